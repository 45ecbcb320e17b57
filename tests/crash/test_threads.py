"""Threads: those that outlive the main thread save, those that cannot start are told, and callbacks may close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steps import OPTIONS, PRELUDE, assert_holds, providers

import datastates as ds
from datastates.errors import ClosedError
from datastates.saving.snapshot import Snapshot

OUTLIVE = f"""
{PRELUDE}
import atexit, threading
ckpt = ds.Checkpointer(root, **OPTIONS)
def train(close):
    threading.main_thread().join()
    ckpt.snapshot(providers(1), step=1)
    ckpt.snapshot(providers(2), step=2)
    ckpt.snapshot(providers(3), step=3)
    if close:
        ckpt.close()
"""


@pytest.mark.parametrize("close", [False, True])
def test_a_thread_that_outlives_the_main_thread_saves(close: bool, tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run("-c", f"{OUTLIVE}\nthreading.Thread(target=train, args=({close},)).start()", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert_holds(tmp_path, 1, 2, 3)


def test_an_exit_function_saves(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{OUTLIVE}
atexit.register(lambda: ds.snapshot(providers(2), root + "/one"))
atexit.register(lambda: ckpt.snapshot(providers(1), step=1))
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".openings", "one", "step-00000001"]


def test_where_no_thread_can_be_started_the_error_says_so_and_nothing_is_lost(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{PRELUDE}
import _thread
from datastates.errors import ThreadStartError
ckpt = ds.Checkpointer(root, **OPTIONS)
start = _thread.start_new_thread
def refuse(*_): raise RuntimeError("can't start new thread")
_thread.start_new_thread = refuse
for _ in range(2):
    try:
        ckpt.snapshot(providers(1), step=1)
    except ThreadStartError as error:
        print(error)
_thread.start_new_thread = start
assert set(os.listdir(root)) <= {{".openings"}}
ckpt.snapshot(providers(2), step=2)
ckpt.close()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("datastates_0: can't start new thread. Raise the limit") == 2
    assert "ulimit -u" in ended.stdout
    assert_holds(tmp_path, 2)


def test_close_in_on_commit_closes_once_all_is_committed(tmp_path: Path) -> None:
    called = threading.Event()

    def close(snapshot: Snapshot) -> None:
        ckpt.close()
        called.set()

    ckpt = ds.Checkpointer(tmp_path, on_commit=close, **OPTIONS)
    ckpt.snapshot(providers(1), step=1)
    assert called.wait(30)
    with pytest.raises(ClosedError, match="is closed"):
        ckpt.snapshot(providers(2), step=2)
    ckpt.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("datastates")] == []
    assert_holds(tmp_path, 1)


def test_a_process_ends_well_while_a_daemon_reads(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
import threading
from datastates.executor.jobs import ReadJob
class Last:
    def __init__(self):
        self.task = f"/proc/self/task/{{reading.native_id}}"
    def __del__(self, stat=os.stat, write=os.write):  # runs when the interpreter ends
        try:
            while True:
                stat(self.task)
        except FileNotFoundError:
            write(1, b"ended")
ds.snapshot(providers(1), root + "/one").wait_committed()
_native.arm_fault("read", "delay", 60_000)
waits, wait = threading.Event(), ReadJob.wait
ReadJob.wait = lambda job: (waits.set(), wait(job))
sys.setswitchinterval(60)  # so the main thread goes on once the other one waits
reading = threading.Thread(target=ds.load, args=(root + "/one",), daemon=True)
reading.start()
sys.last = Last()
waits.wait()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended", "")
