"""A run that was stopped while it committed, and wakes after its job was restarted, commits and deletes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steps import OPTIONS, PRELUDE, array_of, assert_holds, providers

import datastates as ds
from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.providers import HostTensorProvider

Start = Callable[..., "subprocess.Popen[str]"]

OLD = (
    PRELUDE
    + """
from datastates._base import faults
from datastates.providers import ReplicatedProvider
rank, ranks, keep, nth = (int(sys.argv[i]) for i in (2, 3, 4, 6))
point = sys.argv[5]
world = dict(rank=rank, world_size=ranks, rank_timeout=60) if ranks > 1 else {}
def state(step):
    return [ReplicatedProvider(p, range(ranks)) for p in providers(step)]
def tell(call):
    try:
        call()
        print("done")
    except ds.DatastatesError as error:
        print(type(error).__name__, error)
ckpt = ds.Checkpointer(root, keep_last=keep or None, on_error="warn", **OPTIONS, **world)
ckpt.snapshot(state(5), step=5).wait_committed()
ckpt.snapshot(state(10), step=10).wait_committed()
if point != "none":
    faults.arm(faults.Fault(point, "stop", 0, nth))
tell(lambda: ckpt.snapshot(state(20), step=20).wait_committed())
tell(lambda: ckpt.snapshot(state(21), step=21).wait_committed())
tell(ckpt.close)
"""
)
BEFORE = [
    ("store.mkdir", 1),
    ("store.lock", 1),
    ("store.open", 1),
    ("store.write", 1),
    ("store.sync", 1),
    ("store.sync_directory", 1),
    ("store.rename", 1),
]
"""The steps of a commit by one rank up to the rename, each with the number of the hit."""
AFTER = [("store.unlock", 1), ("store.sync_directory", 2), ("store.open", 2), ("store.rename", 2)]
"""The steps after it; the last two are those of a deletion."""
OF_RANK_0 = [("barrier.decide", 1), ("store.open", 1), ("store.rename", 1), ("barrier.publish", 1)]
OF_RANK_1 = [("store.mkdir", 1), ("store.sync_directory", 1), ("barrier.post", 1), ("barrier.wait", 1)]


def mostly_by_hand(cases: list[Any], short: list[Any]) -> list[Any]:
    return [case if case in short else pytest.param(*case, marks=pytest.mark.by_hand) for case in cases]


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert found is not None
    assert found.si_code == os.CLD_STOPPED, process.communicate()


def restart(root: Path, keep: int | None) -> list[int]:
    """A new run in this process: it restores, and saves 20, 30 and 40; returns the steps that it has kept."""
    live = {"a": np.zeros(100_000)}
    with ds.Checkpointer(root, keep_last=keep, **OPTIONS) as ckpt:
        restored = ckpt.restore([HostTensorProvider("model", live)])
        assert restored is not None
        assert np.array_equal(live["a"], array_of(restored.step))
        for step in (20, 30, 40):
            ckpt.snapshot(providers(step), step=step).wait_committed()
    return ckpt.steps()


def wake(*processes: subprocess.Popen[str]) -> list[list[str]]:
    """Let processes go on; returns the lines that each then prints."""
    for process in processes:
        os.kill(process.pid, signal.SIGCONT)
    told = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return [out.splitlines() for out, _ in told]


def assert_untouched(root: Path, steps: list[int]) -> None:
    assert_holds(root, *steps)
    with ds.open(root) as opened:
        assert opened.step == 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "nth", "keep"),
    mostly_by_hand(
        [(*at, keep) for at in BEFORE for keep in (0, 1)],
        [("store.mkdir", 1, 0), ("store.sync", 1, 1), ("store.rename", 1, 1)],
    ),
)
def test_who_was_stopped_before_the_commit_does_not_commit(
    point: str, nth: int, keep: int, tmp_path: Path, start: Start
) -> None:
    old = start("-c", OLD, tmp_path, 0, 1, keep, point, nth)
    wait_until_stopped(old)
    steps = restart(tmp_path, keep or None)
    ((saved, later, closed),) = wake(old)
    assert saved.startswith(f"FencedError a newer run saves in {tmp_path}: process {os.getpid()} on host ")
    assert later.startswith("FencedError")
    assert closed == "done"
    assert_untouched(tmp_path, steps)


@pytest.mark.parametrize(
    ("point", "nth", "keep"),
    mostly_by_hand(
        [(*at, 1) for at in AFTER] + [(*at, 0) for at in AFTER[:2]],
        [("store.rename", 2, 1)],
    ),
)
def test_who_was_stopped_after_the_commit_deletes_nothing_of_the_new_run(
    point: str, nth: int, keep: int, tmp_path: Path, start: Start
) -> None:
    old = start("-c", OLD, tmp_path, 0, 1, keep, point, nth)
    wait_until_stopped(old)
    steps = restart(tmp_path, keep or None)
    ((_, later, _),) = wake(old)
    assert later.startswith("FencedError")
    committed = newest.committed(tier_of(tmp_path))
    assert [step for step in committed if step >= 20] == [step for step in steps if step >= 20]
    assert all(np.array_equal(ds.load(committed[step])["model"]["a"], array_of(step)) for step in committed)
    with ds.open(tmp_path) as opened:
        assert opened.step == 40


@pytest.mark.parametrize(
    ("rank", "point", "nth", "keep"),
    mostly_by_hand(
        [(rank, *at, keep) for rank, points in ((0, OF_RANK_0), (1, OF_RANK_1)) for at in points for keep in (0, 1)],
        [(0, "store.rename", 1, 1), (1, "barrier.wait", 1, 0)],
    ),
)
def test_two_ranks_that_were_stopped(rank: int, point: str, nth: int, keep: int, tmp_path: Path, start: Start) -> None:
    old = [start("-c", OLD, tmp_path, r, 2, keep, point if r == rank else "none", nth) for r in range(2)]
    wait_until_stopped(old[rank])
    os.kill(old[1 - rank].pid, signal.SIGSTOP)
    wait_until_stopped(old[1 - rank])
    steps = restart(tmp_path, keep or None)
    told = wake(*old)
    if point != "barrier.publish":  # it has committed then
        assert [lines[0].split()[0] for lines in told] == ["FencedError"] * 2, told
    assert [lines[1].split()[0] for lines in told] == ["FencedError"] * 2, told
    assert_untouched(tmp_path, steps)


@pytest.mark.by_hand
def test_who_only_looks_fences_nobody(tmp_path: Path) -> None:
    """As an evaluation beside the training: another process opens, restores and closes, or does not close."""
    look = PRELUDE + (
        "ckpt = ds.Checkpointer(root, **OPTIONS)\n"
        "live = {'a': np.zeros(100_000)}\n"
        "assert ckpt.restore([HostTensorProvider('model', live)]).step == ckpt.latest() == ckpt.steps()[-1]\n"
        "if sys.argv[2] == 'close': ckpt.close()"
    )
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        for step, end in ((1, "close"), (2, "exit"), (3, "close")):
            ckpt.snapshot(providers(step), step=step).wait_committed()
            with ckpt.gate():
                subprocess.run([sys.executable, "-c", look, tmp_path, end], check=True)
        snapshot = ckpt.snapshot(providers(4), step=4)
    assert snapshot.committed
    assert_holds(tmp_path, 1, 2, 3, 4)
