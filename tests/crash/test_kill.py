"""SIGKILL at every named fault point and at random times: what was committed stays whole, the rest is cleaned up."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from steps import OPERATIONS

import datastates as ds
from datastates import _native
from datastates.commit.tiers import tier_of

LOOP = Path(__file__).with_name("training_loop.py")
PYTHON_POINTS = [f"store.{operation}=kill@{nth}" for operation in OPERATIONS for nth in (1, 3)]
DIRECTORY_SYNCS = [f"store.sync_directory=kill@{nth}" for nth in (4, 5, 6, 7)]
NATIVE_POINTS = [
    *(f"open=kill@{nth}" for nth in (1, 4, 5)),
    *(f"read=kill@{nth}" for nth in (1, 3)),
    *(f"allocate=kill@{nth}" for nth in (1, 2)),
    *(f"write=kill@{nth}" for nth in (1, 2, 4, 5, 6, 9)),
    *(f"close=kill@{nth}" for nth in (1, 2)),
    *(f"sync=kill@{nth}" for nth in (1, 2, 3)),
]
STEPS_BEFORE = 2


@pytest.fixture(scope="module")
def prepared(training: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two committed steps, and the debris of an earlier crash before and after a commit."""
    root = tmp_path_factory.mktemp("prepared") / "run"
    state = training.state_of(0)
    with ds.Checkpointer(root, **training.OPTIONS) as ckpt:
        for step in range(1, STEPS_BEFORE + 1):
            with ckpt.gate():
                training.update(state, step)
            ckpt.snapshot(training.providers_of(state), step=step)
    for name in ("step-00000009.partial-0123abcd", "step-00000000.r1.partial-89abcdef"):
        (root / name).mkdir()
        (root / name / "rank-00000.pt").write_bytes(b"left over")
    return root


def test_the_matrix_covers_the_manifest_and_the_native_core() -> None:
    assert {"mkdir", "lock", "open", "write", "sync", "sync_directory", "rename", "unlock", "remove"} <= set(OPERATIONS)
    for point in NATIVE_POINTS:
        _native.arm_fault(point.partition("=")[0], "delay", 0, 1, 1)


EVERY = [*PYTHON_POINTS, *DIRECTORY_SYNCS, *NATIVE_POINTS]
FEW = EVERY[::6]


@pytest.mark.parametrize("fault", [*FEW, *(pytest.param(f, marks=pytest.mark.by_hand) for f in EVERY if f not in FEW)])
def test_killed_at_a_fault_point(
    fault: str, prepared: Path, tmp_path: Path, run: Callable[..., Any], audit: Callable[..., Any], resume: Any
) -> None:
    root = tmp_path / "run"
    shutil.copytree(prepared, root)
    ended = run(LOOP, root, 5, DATASTATES_FAULTS=fault)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    committed = audit(root)
    announced = [int(line) for line in ended.stdout.splitlines()[1:]]
    assert committed[-1] >= max([STEPS_BEFORE, *announced])
    resume(root)


@pytest.mark.long
def test_killed_in_a_write_of_each_backend(
    backend: str, tmp_path: Path, run: Callable[..., Any], audit: Callable[..., Any], resume: Any
) -> None:
    variables = {"DATASTATES_FAULTS": "write=kill@8", "DATASTATES_IO_BACKEND": backend}
    ended = run(LOOP, tmp_path, 5, **variables)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    audit(tmp_path)
    resume(tmp_path)


def test_killed_in_the_first_snapshot_leaves_nothing_to_restore(
    tmp_path: Path, run: Callable[..., Any], audit: Callable[..., Any], resume: Any
) -> None:
    ended = run(LOOP, tmp_path, 5, DATASTATES_FAULTS="store.rename=kill")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert audit(tmp_path) == []
    assert len(tier_of(tmp_path).debris()) >= 1
    resume(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.by_hand) for seed in (2, 3))])
def test_killed_at_random_times_again_and_again(
    seed: int, tmp_path: Path, start: Callable[..., subprocess.Popen[str]], audit: Callable[..., Any], resume: Any
) -> None:
    times = random.Random(seed)
    newest = 0
    for _ in range(5):
        process = start(LOOP, tmp_path, 100_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(times.uniform(0.0, 0.25))
        process.kill()
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        steps = audit(tmp_path)
        # a line that the kill cut short does not count
        announced = [int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")]
        assert max([0, *steps]) >= max([newest, *announced])
        newest = max([0, *steps])
    resume(tmp_path)
