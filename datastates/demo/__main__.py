"""Tell the story in four processes: one that trains, one that is killed, and one that resumes; this one looks."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import datastates as ds
from datastates.cli import commands
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


def _run(directory: Path, *options: str, status: int = 0) -> str:
    """Train in a new process; returns what it prints. Exits where it does not end with the status."""
    command = [sys.executable, "-m", "datastates.demo", "--train", str(directory), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # several threads would wait long on a busy machine
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != status:
        sys.exit(f"the training ended with status {done.returncode}, and should have ended with {status}")
    return done.stdout


def _look_inside(directory: Path) -> None:
    with ds.open(directory) as checkpoint:
        print(f"\nInside are {len(checkpoint)} arrays. Each is read and verified when it is asked for:")
        for key, array in itertools.islice(checkpoint.items(), 3):
            print(f"  {key}  {array.dtype}  {tuple(array.shape)}")
    print("The commands `datastates inspect`, `verify`, `diff` and `export` say more of such a directory.")


def _tell(scratch: Path) -> None:
    whole, killed = scratch / "whole", scratch / "killed"
    print(f"Training {STEPS} steps without interruption, a checkpoint every {EVERY} …", flush=True)
    reference = Trained(**json.loads(_run(whole)))
    stall = 1e3 * statistics.median(reference.stalls)
    print(f"For each checkpoint of {reference.nbytes / 1e6:.0f} MB it waited {stall:.1f} ms.\n")
    print(f"Training again, and killing it while it writes the checkpoint of step {KILLED} …", flush=True)
    _run(killed, "--kill", status=-signal.SIGKILL)
    commands.main(["ls", str(killed)])
    print("\nResuming …", flush=True)
    resumed = Trained(**json.loads(_run(killed)))
    if resumed.losses != reference.losses:
        sys.exit("the losses differ")
    final = float.fromhex(resumed.losses[str(STEPS)])
    print(f"Resumed at step {resumed.start}; all {STEPS} losses equal to the last bit (the last is {final:.4f}).")
    _look_inside(killed)


def main() -> None:
    """Tell the story, or be one of its processes."""
    parser = argparse.ArgumentParser(prog="python -m datastates.demo", description=__doc__)
    parser.add_argument("--train", type=Path, metavar="DIR", help="only train, with checkpoints in DIR; prints JSON")
    parser.add_argument("--kill", action="store_true", help="with --train: die in the middle of a checkpoint")
    arguments = parser.parse_args()
    if arguments.train is not None:
        print(json.dumps(dataclasses.asdict(train(make_model(), arguments.train, killed=arguments.kill))))
        return
    with tempfile.TemporaryDirectory(prefix="datastates-demo-") as scratch:
        _tell(Path(scratch))


if __name__ == "__main__":
    main()
