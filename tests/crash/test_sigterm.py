"""SIGTERM with ``handle_sigterm``: snapshots in flight are committed, whatever it interrupts; then it takes effect."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steps import PRELUDE, assert_holds

INTERRUPTED = {
    "right behind the gate's guard": """
from datastates.saving import gate
guard = gate.guard
def interrupted(snapshot, **how):
    guard(snapshot, **how)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(0.5)  # time to end the process, if no snapshot counted as in flight
gate.guard = interrupted
""",
    # the snapshot counts as in flight, and no thread has it yet
    "before a thread has it": """
from datastates._base.workers import Workers
put = Workers.put
def interrupted(self, work):
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGTERM)
    put(self, work)
Workers.put = interrupted
""",
    # the main thread holds a lock that the snapshot's own thread needs, too
    "in the gate": """
from datastates.state import versions
from datastates.executor.jobs import WriteJob
main, in_gate = threading.main_thread(), threading.Event()
witness, wait_captured = versions.witness, WriteJob.wait_captured
def interrupted(tensors):
    if snapshots and threading.current_thread() is main:
        in_gate.set()
        os.kill(os.getpid(), signal.SIGTERM)
    return witness(tensors)
versions.witness = interrupted
WriteJob.wait_captured = lambda self: (in_gate.wait(), wait_captured(self))
""",
}


@pytest.mark.parametrize("where", INTERRUPTED)
def test_it_hangs_nowhere(where: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
import threading
snapshots = []
{INTERRUPTED[where]}
ckpt = ds.Checkpointer(root, handle_sigterm=True, **OPTIONS)
snapshots.append(ckpt.snapshot(providers(1), step=1))
ckpt.gate()
threading.Event().wait()
"""
    ended = run("-c", script, tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert_holds(tmp_path, 1)


def test_training_goes_on_while_it_is_committed(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
import threading
from datastates.storage.local import LocalStore
go_on, rename = threading.Event(), LocalStore.rename
LocalStore.rename = lambda store, *paths: (go_on.wait(), rename(store, *paths))
ckpt = ds.Checkpointer(root, handle_sigterm=True, **OPTIONS)
snapshot = ckpt.snapshot(providers(1), step=1)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
print(snapshot.committed, flush=True)
go_on.set()
threading.Event().wait()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "False\n"), ended.stderr
    assert_holds(tmp_path, 1)


def test_a_handler_that_returns_lets_the_process_live_and_runs_in_the_main_thread(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{PRELUDE}
import threading
called = threading.Event()
def mine(number, frame):
    print(number == signal.SIGTERM, threading.current_thread() is threading.main_thread(), snapshot.committed)
    called.set()
signal.signal(signal.SIGTERM, mine)
with ds.Checkpointer(root, handle_sigterm=True, **OPTIONS) as ckpt:
    snapshot = ckpt.snapshot(providers(1), step=1)
    os.kill(os.getpid(), signal.SIGTERM)
    called.wait()
    ckpt.snapshot(providers(2), step=2)
print(signal.getsignal(signal.SIGTERM) is mine)
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "True True True\nTrue\n"), ended.stderr
    assert_holds(tmp_path, 1, 2)


def test_where_it_was_ignored_it_is_ignored(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
import threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ckpt = ds.Checkpointer(root, handle_sigterm=True, **OPTIONS)
ckpt.snapshot(providers(1), step=1)
os.kill(os.getpid(), signal.SIGTERM)
for thread in threading.enumerate():
    if "sigterm" in thread.name:
        thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
    assert_holds(tmp_path, 1)


def test_without_a_snapshot_it_ends_the_process_at_once(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
ckpt = ds.Checkpointer(root, handle_sigterm=True, **OPTIONS)
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended.stderr


def test_two_checkpointers_both_commit(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
import threading
one, two = (ds.Checkpointer(os.path.join(root, name), handle_sigterm=True, **OPTIONS) for name in ("one", "two"))
one.snapshot(providers(1), step=1)
two.snapshot(providers(2), step=2)
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait()
"""
    ended = run("-c", script, tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert_holds(tmp_path / "one", 1)
    assert_holds(tmp_path / "two", 2)


def test_a_forked_child_ends_at_once(tmp_path: Path, run: Callable[..., Any]) -> None:
    """A data loader's worker inherits the handler, but no thread of its parent."""
    script = f"""
{PRELUDE}
import threading
with ds.Checkpointer(root, handle_sigterm=True, **OPTIONS) as ckpt:
    ckpt.snapshot(providers(1), step=1)
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(here, b"!")  # before that a signal may get lost in the fork
        threading.Event().wait()
    os.read(there, 1)
    os.kill(child, signal.SIGTERM)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM)
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
    assert_holds(tmp_path, 1)


@pytest.mark.parametrize("before", ["", "signal.signal(signal.SIGTERM, lambda *_: print('mine'))"])
def test_closing_while_it_is_committed_does_not_lose_the_signal(
    before: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{PRELUDE}
import threading
from datastates.storage.local import LocalStore
{before}
go_on, rename = threading.Event(), LocalStore.rename
LocalStore.rename = lambda store, *paths: (go_on.wait(), rename(store, *paths))
with ds.Checkpointer(root, handle_sigterm=True, **OPTIONS) as ckpt:
    ckpt.snapshot(providers(1), step=1)
    os.kill(os.getpid(), signal.SIGTERM)
    go_on.set()
for thread in threading.enumerate():
    if "sigterm" in thread.name:
        thread.join()
"""
    ended = run("-c", script, tmp_path)
    expected = (0, "mine\n") if before else (-signal.SIGTERM, "")
    assert (ended.returncode, ended.stdout) == expected, ended.stderr
    assert_holds(tmp_path, 1)


LOOP = f"""
{PRELUDE}
import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
with ds.Checkpointer(root, handle_sigterm=True, every=10**6, grace=GRACE, **OPTIONS) as ckpt:
    assert ckpt.seconds_until_durable() is None
    ckpt.snapshot(providers(1), step=1).wait_committed()
    assert 0 < ckpt.seconds_until_durable() < 600
    assert [ckpt.due(10**6), ckpt.due(2)] == [True, False]
    os.kill(os.getpid(), signal.SIGTERM)
    step = 2
    while True:
        step += 1
        time.sleep(0.001)  # a training step
        if ckpt.due(step):
            ckpt.snapshot(providers(step), step=step)
"""


def test_a_last_snapshot_is_taken_if_it_can_be_durable_in_time(tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run("-c", LOOP.replace("GRACE", '"10min"'), tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    (line,) = ended.stdout.splitlines()
    step = int(line.removeprefix("SIGTERM: a last snapshot from step ").partition(" on: ")[0])
    assert 3 <= step < 10**6
    assert_holds(tmp_path, 1, step)


def test_no_last_snapshot_is_taken_if_it_would_be_cut_off(tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run("-c", LOOP.replace("GRACE", "1e-6"), tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert ended.stdout.startswith("SIGTERM: no last snapshot: it needs ")
    assert_holds(tmp_path, 1)
