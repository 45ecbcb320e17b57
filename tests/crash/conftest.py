"""What the crash tests share: faults are disarmed after each test, and no process outlives the test that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import module_at

import datastates as ds
from datastates import _native
from datastates.commit import fence, newest, retention
from datastates.commit.tiers import tier_of
from datastates.errors import DatastatesError
from datastates.formats.own import verify_container
from datastates.kept import Keep
from datastates.reading.every_container import open_checkpoint

SCRIPT_SECONDS = 120
HERE = Path(__file__).parent
LOOP = HERE / "training_loop.py"
sys.path.insert(0, str(HERE))  # what these tests share

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=["io_uring", "pwrite"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each I/O backend that this system allows."""
    if request.param == "io_uring":
        try:
            _native.Executor(
                cache_bytes=2 << 20, block_bytes=1 << 20, queue_depth=2, backend="io_uring", direct=False, io_threads=1
            )
        except DatastatesError as error:
            pytest.skip(f"io_uring is not allowed here: {error}")
    return str(request.param)


@pytest.fixture(scope="session")
def training() -> ModuleType:
    """The training loop's module, which knows the state at each step."""
    return module_at(LOOP)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python with some arguments and variables, in a process group that ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Run:
    """Run Python to its end; a process that hangs fails the test."""

    def to_the_end(
        *arguments: object, timeout: float = SCRIPT_SECONDS, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, **variables)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return to_the_end


@pytest.fixture(scope="session")
def audit(training: ModuleType) -> Callable[[Path], list[int]]:
    """Check what a crash left in a directory of the training loop's checkpoints; returns the committed steps."""

    def check(root: Path) -> list[int]:
        committed = newest.committed(tier_of(root))
        checkpoints = {*committed.values(), *retention.outdated(tier_of(root), Keep())}
        # killed between the making of the lock file and its line: the directory stays for a day, as nobody is known
        nobodys = {path.parent for path in root.glob("*/.lock") if not path.stat().st_size}
        assert set(tier_of(root).debris()) == set(root.iterdir()) - checkpoints - nobodys - {root / fence.FOLDER}
        for step, path in committed.items():
            opened, containers = open_checkpoint(path)
            assert opened.step == step
            problems = [p for c in containers for p in verify_container(c, lambda _: None)]
            assert problems == []
            assert training.differences(ds.load(path), step) == []
        return list(committed)

    return check


@pytest.fixture
def resume(training: ModuleType, audit: Callable[[Path], list[int]]) -> Callable[[Path], Any]:
    """Run again in a directory: check that it cleans up, loses no checkpoint, restores the newest and saves another."""

    def next_run(root: Path) -> None:
        before = newest.committed(tier_of(root))
        state = training.state_of(0)
        providers = training.providers_of(state)
        with ds.Checkpointer(root, **training.OPTIONS) as ckpt:
            assert newest.committed(tier_of(root)) == before
            restored = ckpt.restore(providers)
            begin = restored.step if restored else 0
            assert begin == max(before, default=0)
            assert training.differences(state, begin) == []
            step = begin + 1
            with ckpt.gate():
                training.update(state, step)
            ckpt.snapshot(providers, step=step)
        assert audit(root)[-1] == step
        assert tier_of(root).debris() == []

    return next_run
