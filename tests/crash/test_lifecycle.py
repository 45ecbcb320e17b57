"""A checkpointer's life until the process ends: flushing, signals, reports of failures, limits and timeouts."""

from __future__ import annotations

import _thread
import errno
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hold import END, held
from steps import OPTIONS, PRELUDE, array_of, assert_holds, fail_one, providers

import datastates as ds
from datastates import _native
from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.errors import (
    ClosedError,
    SnapshotRefusedError,
    SnapshotTimeoutError,
    StorageError,
    ThreadStartError,
)
from datastates.providers import HostTensorProvider
from datastates.saving import engine, telling
from datastates.saving.snapshot import Snapshot, wait_ended

# --- ending


def test_close_waits_for_the_commit_and_may_be_called_again(tmp_path: Path) -> None:
    ckpt = ds.Checkpointer(tmp_path, **OPTIONS)
    with held("sync", until=END):
        taken = [ckpt.snapshot(providers(step), step=step) for step in (1, 2)]
        assert not any(s.committed for s in taken)
        ckpt.close()
    assert all(s.committed for s in taken)
    ckpt.close()
    assert_holds(tmp_path, 1, 2)


def test_leaving_the_block_waits_for_the_commit(tmp_path: Path) -> None:
    with held("sync", until=END), ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        snapshot = ckpt.snapshot(providers(1), step=1)
        assert not snapshot.committed
    assert snapshot.committed
    assert_holds(tmp_path, 1)


def fail_in_the_block(root: Path) -> None:
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1)
        raise KeyError("mine")


def test_an_error_in_the_block_is_the_one_that_leaves_it_and_the_snapshot_is_committed(
    tmp_path: Path,
) -> None:
    with held("sync", until=END), pytest.raises(KeyError, match="mine"):
        fail_in_the_block(tmp_path)
    assert_holds(tmp_path, 1)


def test_an_error_in_the_block_is_not_replaced_by_that_of_a_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _native.arm_fault("sync", "fail", errno.EIO, 1, 1)
    with pytest.raises(KeyError, match="mine"):
        fail_in_the_block(tmp_path)
    assert "Input/output error" in caplog.text


def test_a_closed_checkpointer_says_so(tmp_path: Path) -> None:
    ckpt = ds.Checkpointer(tmp_path, **OPTIONS)
    ckpt.close()
    with pytest.raises(ClosedError, match=str(tmp_path)):
        ckpt.snapshot(providers(1), step=1)
    with pytest.raises(ClosedError, match=str(tmp_path)):
        ckpt.restore(providers(1))


@pytest.mark.long
@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "del ckpt, a, b"])
def test_the_interpreter_exits_only_after_the_commit(ending: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
hold_until_exit("sync")
ckpt = ds.Checkpointer(root, **OPTIONS)
a, b = ckpt.snapshot(providers(1), step=1), ckpt.snapshot(providers(2), step=2)
print(a.committed, b.committed)
{ending}
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "False False\n"
    assert_holds(tmp_path, 1, 2)


def test_an_uncaught_error_lets_the_snapshot_in_flight_commit(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
hold_until_exit("sync")
ckpt = ds.Checkpointer(root, **OPTIONS)
ckpt.snapshot(providers(1), step=1)
raise RuntimeError("training failed")
"""
    ended = run("-c", script, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.endswith("RuntimeError: training failed\n")
    assert_holds(tmp_path, 1)


@pytest.mark.parametrize("kept", ["snap = ", ""])
def test_the_interpreter_exits_only_after_the_commit_of_a_single_snapshot(
    kept: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{PRELUDE}
hold_until_exit("sync")
{kept}ds.snapshot(providers(1), root + "/one", **OPTIONS)
print(os.path.exists(root + "/one"))
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\n", "")
    assert np.array_equal(ds.load(tmp_path / "one")["model"]["a"], array_of(1))
    assert [e.name for e in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("take", ["ckpt = ds.Checkpointer(root, **OPTIONS); ckpt.snapshot", "ds.snapshot"])
def test_a_snapshot_that_fails_as_the_interpreter_exits_is_not_silent(
    take: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    arguments = "step=1" if "ckpt" in take else 'root + "/one", **OPTIONS'
    script = f"""
{PRELUDE}
_native.arm_fault("sync", "fail", {errno.EIO}, 1, 1)
{take}(providers(1), {arguments})
"""
    ended = run("-c", script, tmp_path)
    assert "Input/output error" in ended.stderr


# --- signals


def sigterm_script(setting: str, before: str = "") -> str:
    return f"""
{PRELUDE}
{before}
ckpt = ds.Checkpointer(root, {setting} **OPTIONS)
with held("sync", until=END):
    snaps = [ckpt.snapshot(providers(step), step=step) for step in (1, 2)]
    assert not any(s.committed for s in snaps)
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100):
        time.sleep(0.1)
print("alive")
"""


def test_sigterm_commits_what_is_in_flight_and_then_ends_the_process(tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run("-c", sigterm_script("handle_sigterm=True,"), tmp_path)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended.stderr
    assert_holds(tmp_path, 1, 2)
    assert tier_of(tmp_path).debris() == []


def test_sigterm_from_outside_while_waiting_for_a_snapshot(tmp_path: Path, start: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
ckpt = ds.Checkpointer(root, handle_sigterm=True, **OPTIONS)
with held("sync", until=END):
    snap = ckpt.snapshot(providers(1), step=1)
    print("waiting", flush=True)
    snap.wait_committed()
    time.sleep(60)
"""
    process = start("-c", script, tmp_path)
    assert process.stdout.readline() == "waiting\n"
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM, err
    assert_holds(tmp_path, 1)


def test_sigterm_calls_the_handler_that_was_there(tmp_path: Path, run: Callable[..., Any]) -> None:
    before = "signal.signal(signal.SIGTERM, lambda *_: (print('mine'), sys.exit(7)))"
    ended = run("-c", sigterm_script("handle_sigterm=True,", before), tmp_path)
    assert (ended.returncode, ended.stdout) == (7, "mine\n"), ended.stderr
    assert_holds(tmp_path, 1, 2)


def test_sigterm_is_left_alone_by_default(tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run("-c", sigterm_script(""), tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert list(newest.committed(tier_of(tmp_path))) == []


def test_close_gives_the_signal_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ds.Checkpointer(tmp_path, handle_sigterm=True, **OPTIONS):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupted_close_loses_nothing(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = """
import os, signal, sys, threading, time
import numpy as np
import datastates as ds
from datastates.storage.local import LocalStore
from datastates.providers import HostTensorProvider
signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored a child ignores it, too
interrupted, rename = threading.Event(), LocalStore.rename
LocalStore.rename = lambda store, *paths: (interrupted.wait(), rename(store, *paths))  # close() cannot end before that
ckpt = ds.Checkpointer(sys.argv[1], host_cache="2MiB", block="1MiB")
ckpt.snapshot([HostTensorProvider("model", {"a": np.arange(10)})], step=1)
try:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    ckpt.close()
except KeyboardInterrupt:
    print("interrupted")
interrupted.set()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n")
    assert list(newest.committed(tier_of(tmp_path))) == [1]


# --- failures are told once


def test_the_next_snapshot_raises_a_failure_once(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        fail_one(ckpt, 1)
        with pytest.raises(StorageError, match="Input/output error"):
            ckpt.snapshot(providers(2), step=2)
        ckpt.snapshot(providers(2), step=2).wait_committed()
        assert ckpt.failures == 1
    assert_holds(tmp_path, 2)


def test_close_raises_a_failure_that_nobody_was_told_of(tmp_path: Path) -> None:
    ckpt = ds.Checkpointer(tmp_path, **OPTIONS)
    fail_one(ckpt, 1)
    with pytest.raises(StorageError, match="Input/output error"):
        ckpt.close()
    ckpt.close()


@pytest.mark.parametrize("ask", ["wait_captured", "wait_persisted", "wait_committed"])
def test_a_wait_raises_the_failure_and_the_next_snapshot_does_not_repeat_it(ask: str, tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        _native.arm_fault("open", "fail", errno.EMFILE, 1, 1)
        # twice the cache: without a file the rest is never captured, however late the failure comes
        failed = ckpt.snapshot([HostTensorProvider("model", {"a": np.zeros(1 << 20)}, lazy=True)], step=1)
        for _ in range(2):  # a wait raises as often as it is asked
            with pytest.raises(StorageError, match="Too many open files"):
                getattr(failed, ask)()
        ckpt.snapshot(providers(2), step=2).wait_committed()
    assert ckpt.failures == 1


def test_a_snapshot_that_fails_while_failures_are_counted_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = ds.Checkpointer(tmp_path, **OPTIONS)
    wait_ended([fail_one(ckpt, 1)])
    answers = [False]  # it ends right after it was first asked
    monkeypatch.setattr(telling, "has_ended", lambda snapshot: answers.pop() if answers else True)
    ckpt._taken.failure()
    monkeypatch.undo()
    with pytest.raises(StorageError):
        ckpt.close()
    assert ckpt.failures == 1


def test_exception_tells_of_the_failure_too(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        error = fail_one(ckpt, 1).exception()
        assert isinstance(error, StorageError)
        ckpt.snapshot(providers(2), step=2).wait_committed()


def test_of_two_failures_neither_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        _native.arm_fault("sync", "fail", errno.EIO, 1, 2)
        with monkeypatch.context() as patched:
            patched.setattr(ckpt._taken, "failure", lambda: None)  # the second call might see the first failure
            paths = [ckpt.snapshot(providers(step), step=step).path for step in (1, 2)]
        ckpt.wait()
        _native.clear_faults()
        for _ in range(2):
            try:
                ckpt.snapshot(providers(3), step=3).wait_committed()
            except StorageError as error:
                told += [str(error), *getattr(error, "__notes__", [])]
        assert ckpt.failures == 2
    told.append(caplog.text)
    for path in paths:
        assert path.name in "\n".join(told)


def test_with_on_error_warn_failures_are_logged_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        fail_one(ckpt, 1)
        with caplog.at_level(logging.WARNING, "datastates"):
            ckpt.snapshot(providers(2), step=2).wait_committed()
        assert "snapshot 1 failed" in caplog.text
        assert "Input/output error" in caplog.text
        assert ckpt.failures == 1
        fail_one(ckpt, 3)
    assert "snapshot 3 failed" in caplog.text
    assert ckpt.failures == 2
    assert_holds(tmp_path, 2)


def test_a_snapshot_that_finds_no_thread_fails_and_blocks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr(_thread, "start_new_thread", raise_runtime_error)
            with pytest.raises(ThreadStartError, match="could not be started: datastates_0: no thread"):
                ckpt.snapshot(providers(1), step=1)
        ckpt.gate()
        assert [path.name for path in tmp_path.iterdir()] == [".openings"]
        ckpt.snapshot(providers(2), step=2).wait_committed()


def raise_runtime_error(*_: object) -> None:
    raise RuntimeError("no thread")


# --- limits


def test_two_are_in_flight_and_a_third_waits(tmp_path: Path) -> None:
    with held("sync", until=END), ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        first, second = (ckpt.snapshot(providers(step), step=step) for step in (1, 2))
        assert (first.committed, second.committed) == (False, False)
        third = ckpt.snapshot(providers(3), step=3)
        assert first.committed or second.committed
        third.wait_committed()
    assert_holds(tmp_path, 1, 2, 3)


def test_the_wait_for_room_counts_as_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(snapshots: Sequence[Snapshot]) -> None:
        begin = time.monotonic()
        time.sleep(0.1)  # longer than the rest of the call takes
        wait_ended(snapshots)
        waited.append(time.monotonic() - begin)

    monkeypatch.setattr(engine, "wait_ended", wait)
    with held("sync", until=END), ds.Checkpointer(tmp_path, max_in_flight=1, **OPTIONS) as ckpt:
        first = ckpt.snapshot(providers(1), step=1)
        second = ckpt.snapshot(providers(2), step=2)
        assert first.committed
        assert second.report.stall_seconds >= sum(waited) > 0


def test_a_third_is_refused_by_setting_and_the_others_go_on(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, when_busy="refuse", **OPTIONS) as ckpt:
        with held("sync"):
            for step in (1, 2):
                ckpt.snapshot(providers(step), step=step)
            with pytest.raises(SnapshotRefusedError, match="2 snapshots"):
                ckpt.snapshot(providers(3), step=3)
        ckpt.wait()
        ckpt.snapshot(providers(4), step=4)
    assert_holds(tmp_path, 1, 2, 4)


def test_a_wait_that_runs_out_of_time_says_so_and_the_snapshot_goes_on(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        with held("sync"):
            snapshot = ckpt.snapshot(providers(1), step=1)
            for wait in (snapshot.wait_persisted, snapshot.wait_committed):
                with pytest.raises(SnapshotTimeoutError, match="snapshot 1"):
                    wait(0.01)
            assert snapshot.exception() is None
        snapshot.wait_committed(60)
        snapshot.wait_captured(0)
    assert ckpt.failures == 0
    assert_holds(tmp_path, 1)


def test_a_wait_for_capture_runs_out_of_time_while_the_cache_is_full(tmp_path: Path) -> None:
    big = np.arange(1_000_000, dtype=np.float64)
    settings: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB", "io_threads": 1}
    with ds.Checkpointer(tmp_path, **settings) as ckpt:
        with held():
            snapshot = ckpt.snapshot([HostTensorProvider("model", {"a": big}, lazy=True)], step=1)
            with pytest.raises(SnapshotTimeoutError, match="captured"):
                snapshot.wait_captured(0.01)
        snapshot.wait_captured(60)
    assert np.array_equal(ds.load(tmp_path)["model"]["a"], big)


def test_the_three_states_come_in_order(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        with held("sync"):
            snapshot = ckpt.snapshot(providers(1), step=1)
            snapshot.wait_captured()
            assert (snapshot.captured, snapshot.persisted, snapshot.committed) == (True, False, False)
            assert ckpt.latest() is None
        snapshot.wait_committed()
    report = snapshot.report
    assert report.capture_seconds is not None
    assert report.persist_seconds is not None
    assert report.commit_seconds is not None
    assert report.capture_seconds <= report.persist_seconds <= report.commit_seconds


def test_several_threads_may_wait_for_one_snapshot(tmp_path: Path) -> None:
    seen: list[bool] = []
    all_here = threading.Barrier(5)

    def wait(snapshot: ds.Snapshot) -> None:
        all_here.wait()
        snapshot.wait_committed(60)
        seen.append(snapshot.committed)

    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        with held("sync"):
            snapshot = ckpt.snapshot(providers(1), step=1)
            threads = [threading.Thread(target=wait, args=(snapshot,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            all_here.wait()
        for thread in threads:
            thread.join()
    assert seen == [True] * 4
