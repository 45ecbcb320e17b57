"""A command and a run bring the same checkpoints to one place, one of them stopped anywhere: each comes once."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest

import datastates as ds
from datastates.commit.tiers import tier_of
from datastates.providers import from_state_dict
from datastates.storage import Location
from datastates.testing import equal

OPERATIONS = ["list", "lock", "mkdir", "open", "remove", "rename", "stat", "sync", "sync_directory", "unlock", "write"]
RUN = """
import sys
import numpy as np
import datastates as ds
from datastates.providers import from_state_dict

first, far = sys.argv[1:]
with ds.Checkpointer(first, tiers=far, keep_last=1, host_cache="4MiB", block="1MiB") as checkpointer:
    for step in (4, 5):
        state = {"w": np.arange(30_000) + step, "step": step}
        checkpointer.snapshot([from_state_dict("model", state)], step=step).wait_committed()
    checkpointer.wait_drained(60)
"""


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(30_000) + step, "step": step}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started = []

    def begin(fault: str, *arguments: object) -> subprocess.Popen[str]:
        (folder := tmp_path / "elsewhere").mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "DATASTATES_FAULTS": fault},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def stops(process: subprocess.Popen[str]) -> bool:
    """Wait until a process has stopped; False if it has ended."""
    found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_code == os.CLD_STOPPED


def beside(what: str, first: Path, far: Path, capsys: pytest.CaptureFixture[str]) -> set[int]:
    """Do something on the same places; returns the steps that are in the far one for certain then."""
    if what == "drain":
        assert command.run(capsys, "drain", first, far)[0] == 0
        return {one.step for one in tier_of(Location(first)).checkpoints()}
    if what == "fetch":
        there = {one.step for one in tier_of(Location(far)).checkpoints()}
        fetched = far.with_name("fetched")
        assert command.run(capsys, "fetch", far, fetched)[0] == (0 if there else 2)
        for one in tier_of(Location(fetched)).checkpoints(certain=True):
            assert equal(ds.load(one.path.face)["model"], state(one.step))
        return there
    with ds.Checkpointer(first, tiers=far, keep_last=1, host_cache="4MiB", block="1MiB") as checkpointer:
        checkpointer.snapshot([from_state_dict("model", state(3))], step=3).wait_committed()
        checkpointer.wait_drained(60)
    return {1, 2, 3}


def is_right(first: Path, far: Path, steps: set[int]) -> None:
    """Each step came to the far place once, bit for bit, and nothing else lies there."""
    found = tier_of(Location(far)).checkpoints(certain=True)
    assert sorted(one.step for one in found) == sorted(steps)
    for one in found:
        assert equal(ds.load(one.path.face)["model"], state(one.step))
        assert sorted(path.name for path in (far / one.path.name).iterdir()) == ["manifest.json", "rank-00000.pt"]
    assert not list(first.glob("*partial*"))


def round_of(at: str, who: str, other: str, base: Path, start: Any, capsys: pytest.CaptureFixture[str]) -> bool:
    """Stop one at a point, let the other do all, and let the first go on; False if the point was not reached."""
    first, far = base / "first", base / "far"
    with ds.Checkpointer(first, host_cache="4MiB", block="1MiB") as checkpointer:
        for step in (1, 2):
            checkpointer.snapshot([from_state_dict("model", state(step))], step=step).wait_committed()
    words = ("-m", "datastates", "drain", first, far) if who == "drain" else ("-c", RUN, first, far)
    process = start(f"store.{at.partition('@')[0]}=stop@{at.partition('@')[2]}", *words)
    reached = stops(process)
    there = beside(other, first, far, capsys) if reached else set()
    assert there <= {one.step for one in tier_of(Location(far)).checkpoints()}
    process.send_signal(signal.SIGCONT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 0, (at, who, other, text)
    every = there | {1, 2} | ({4, 5} if who == "run" else set())
    beside("drain", first, far, capsys)
    is_right(first, far, every)
    return reached


SOME = [
    ("drain", "lock@1", "drain"),
    ("drain", "stat@4", "run"),
    ("drain", "write@1", "run"),
    ("drain", "rename@2", "drain"),
    ("drain", "sync_directory@3", "fetch"),
    ("run", "rename@2", "drain"),
    ("run", "write@6", "fetch"),
]


@pytest.mark.long
@pytest.mark.parametrize(("who", "at", "other"), SOME)
def test_one_is_stopped_at_a_point(
    who: str, at: str, other: str, tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert round_of(at, who, other, tmp_path, start, capsys)


@pytest.mark.by_hand
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("who", "other"), [("drain", "drain"), ("drain", "run"), ("drain", "fetch"), ("run", "drain"), ("run", "fetch")]
)
def test_either_is_stopped_at_every_point(
    who: str, other: str, tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    points = 0
    for operation in OPERATIONS:
        for nth in itertools.count(1):
            (base := tmp_path / f"{operation}-{nth}").mkdir()
            if not round_of(f"{operation}@{nth}", who, other, base, start, capsys):
                break
            points += 1
            shutil.rmtree(base)
    assert points > 30
