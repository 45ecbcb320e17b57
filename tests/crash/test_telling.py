"""Who hears of a snapshot's end: the log, the callables of the settings, and the exit status."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from steps import OPTIONS, providers

import datastates as ds
from datastates import _native
from datastates._base.workers import Workers
from datastates.commit.ballot import Ballot
from datastates.commit.votes import Vote
from datastates.errors import StorageError, ThreadStartError
from datastates.saving.saver import Saver
from datastates.storage.location import Location

ENDS_WITH_A_FAILURE = """
    import atexit, sys
    atexit.register(print, "other exit functions run")
    import numpy as np
    import datastates as ds
    from datastates import _native
    from datastates.providers import HostTensorProvider

    _native.arm_fault("sync", "fail", 28)
    ckpt = ds.Checkpointer(sys.argv[1], host_cache="4MiB", block="1MiB")
    snapshot = ckpt.snapshot([HostTensorProvider("model", {"a": np.ones(1000)})], step=1)
    print("the last line of the program")
"""


def test_a_commit_is_one_line_at_info(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "datastates"), ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(3), step=3)
    # an earlier test's thread may still tell of its own directory
    (line,) = [text for r in caplog.records if r.levelno == logging.INFO and str(tmp_path) in (text := r.getMessage())]
    assert re.fullmatch(
        r"step 3 committed: [\d.]+ GB, training waited [\d.]+ ms, durable after [\d.]+ s, [\d.]+ GB/s: .*step-00000003",
        line,
    )


def test_a_commit_is_told_on_another_thread(tmp_path: Path) -> None:
    told: list[tuple[int, bool, bool]] = []

    def note(snapshot: ds.Snapshot) -> None:
        told.append((snapshot.step, snapshot.committed, threading.current_thread() is threading.main_thread()))

    with ds.Checkpointer(tmp_path, on_commit=note, **OPTIONS) as ckpt:
        for step in (1, 2):
            ckpt.snapshot(providers(step), step=step).wait_committed()
    assert told == [(1, True, False), (2, True, False)]


def test_snapshots_are_told_one_at_a_time_in_the_order_in_which_they_were_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, threading.Thread]] = []
    second_is_committed = threading.Event()
    commit = Ballot.commit

    def commit_the_first_last(ending: Ballot, vote: Vote) -> Location:
        if vote.step == 1:
            second_is_committed.wait()
        return commit(ending, vote)

    def note(snapshot: ds.Snapshot) -> None:
        told.append((snapshot.step, threading.current_thread()))

    monkeypatch.setattr(Ballot, "commit", commit_the_first_last)
    with ds.Checkpointer(tmp_path, on_commit=note, on_error=note, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1)
        ckpt.snapshot(providers(2), step=2).wait_committed()
        second_is_committed.set()
        ckpt.wait()
        _native.arm_fault("open", "fail", 28)
        ckpt.snapshot(providers(3), step=3)
        ckpt.wait()
        _native.clear_faults()
        ckpt.snapshot(providers(4), step=4)
    assert [step for step, _ in told] == [1, 2, 3, 4]
    assert {thread.name for _, thread in told} == {"datastates-teller_0"}  # an idle one ends, and has a successor


def test_a_callable_that_saves_again_is_told_of_that_failure_even_where_it_has_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    do = Workers.do

    def refuse(workers: Workers, call: Callable[[], object]) -> None:
        if workers._name == "datastates-teller":
            raise ThreadStartError("no thread")
        do(workers, call)

    def save_again(snapshot: ds.Snapshot) -> None:
        told.append(snapshot.step)
        if snapshot.step == 1:
            ckpt.snapshot(providers(2), step=2)

    def fail(*_: object) -> None:
        raise StorageError(28, "open", tmp_path)

    monkeypatch.setattr(Workers, "do", refuse)
    monkeypatch.setattr(Saver, "prepare", fail)
    with ds.Checkpointer(tmp_path, on_error=save_again, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1)
    assert told == [1, 2]


@pytest.mark.parametrize("point", ["open", "sync"], ids=["in the call", "in the background"])
def test_a_failure_is_told_and_not_raised(point: str, tmp_path: Path) -> None:
    told: list[ds.Snapshot] = []
    with ds.Checkpointer(tmp_path, on_error=told.append, **OPTIONS) as ckpt:
        _native.arm_fault(point, "fail", 28)
        failed = ckpt.snapshot(providers(1), step=1)
        with pytest.raises(StorageError):
            failed.wait_committed()
        _native.clear_faults()
        ckpt.snapshot(providers(2), step=2).wait_committed()
    assert told == [failed]
    assert ckpt.failures == 1


def test_what_a_callable_raises_is_logged_and_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(snapshot: ds.Snapshot) -> None:
        raise RuntimeError(f"no way to tell of {snapshot.step}")

    with ds.Checkpointer(tmp_path, on_commit=fail, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1)
        ckpt.snapshot(providers(2), step=2)
    assert ckpt.steps() == [1, 2]
    assert {str(r.exc_info[1]) for r in caplog.records if r.exc_info} == {
        "no way to tell of 1",
        "no way to tell of 2",
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("last", "status"),
    [("", 120), ("ckpt.wait(); snapshot.exception()", 0), ("sys.exit(3)", 120)],
    ids=["nobody asks", "somebody asks", "another status"],
)
def test_the_exit_status_tells_what_nobody_asked_for(last: str, status: int, tmp_path: Path) -> None:
    script = textwrap.dedent(ENDS_WITH_A_FAILURE) + last
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout == "the last line of the program\nother exit functions run\n"
    assert ("nobody asked" in done.stderr) == bool(status)
