"""The training loop of the demonstration, with a checkpointer around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import datastates as ds
from datastates.executor.executor import arm_faults
from datastates.providers import PickledObjectProvider, RngProvider

STEPS = 40
EVERY = 5
KILLED = 25
"""The step whose checkpoint is never completed where the process is to be killed."""


class Model(Protocol):
    """What is trained."""

    @property
    def providers(self) -> Sequence[ds.StateProvider]:
        """All state but that of the global random generators."""

    def step(self) -> float:
        """Learn from one batch; returns its loss."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What one process did: its first step, every loss in hexadecimal, and what its checkpoints cost."""

    start: int
    losses: dict[str, str]
    stalls: list[float]
    """Seconds that the training waited, for each checkpoint."""
    nbytes: int
    """Bytes of the last checkpoint."""


def make_model() -> Model:
    """A GPT where torch is installed, else a network in NumPy alone."""
    if find_spec("torch"):
        from datastates.demo.torch_gpt import TorchGpt

        return TorchGpt()
    from datastates.demo.numpy_network import NumpyNetwork

    return NumpyNetwork()


def train(model: Model, directory: Path, *, killed: bool = False) -> Trained:
    """Train up to step 40, with a checkpoint every 5; resumes from the newest checkpoint in the directory.

    Args:
        model: What is trained.
        directory: Where the checkpoints are.
        killed: SIGKILL this process when it has written some blocks of the checkpoint of step 25.
    """
    losses: dict[str, str] = {}
    snapshots: list[ds.Snapshot] = []
    with ds.Checkpointer(directory, host_cache="64MiB", block="1MiB", keep_last=2) as checkpointer:
        providers = [*model.providers, RngProvider(), PickledObjectProvider("losses", lambda: losses, losses.update)]
        restored = checkpointer.restore(providers)
        start = restored.step if restored else 0
        for step in range(start + 1, STEPS + 1):
            losses[str(step)] = model.step().hex()
            if step % EVERY == 0:
                if killed and step == KILLED:
                    snapshots[-1].wait_committed()
                    arm_faults("write=kill@5")
                snapshots.append(checkpointer.snapshot(providers, step=step))
    reports = [snapshot.report for snapshot in snapshots]
    return Trained(start, losses, [report.stall_seconds for report in reports], reports[-1].nbytes)
