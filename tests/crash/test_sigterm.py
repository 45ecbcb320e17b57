"""SIGTERM with ``handle_sigterm``: snapshots in flight are committed, whatever it interrupts; then it takes effect."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steps import PRELUDE, assert_holds

pytestmark = pytest.mark.long

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


WORKER = f"""
{PRELUDE}
import logging, threading
logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
raised = []
def look(number, frame):  # as a data loader does
    raised.append(os.wait())
    raise RuntimeError("a worker is killed by a signal")
signal.signal(signal.SIGCHLD, look)
worker = os.fork()
if worker == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Event().wait()
def end_both():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(worker, signal.SIGTERM)
    while not raised:
        time.sleep(0.001)
"""


def test_a_last_snapshot_is_taken_after_the_workers_of_a_data_loader_have_died(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{WORKER}
with ds.Checkpointer(root, handle_sigterm=True, every=10**6, grace="10min", **OPTIONS) as ckpt:
    ckpt.snapshot(providers(1), step=1).wait_committed()
    ckpt.due(2), ckpt.due(3)
    end_both()
    step = 4
    while not ckpt.due(step):  # the thread that decides may not have been told yet
        step += 1
    ckpt.snapshot(providers(4), step=4)
    threading.Event().wait()
"""
    ended = run("-c", script, tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert_holds(tmp_path, 1, 4)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.by_hand
def test_a_last_snapshot_is_taken_beside_torch_s_data_loader(
    method: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    pytest.importorskip("torch")
    script = f"""
{PRELUDE}
import multiprocessing
from torch.utils.data import DataLoader
def end_all(workers):
    os.kill(os.getpid(), signal.SIGTERM)  # before the death of a worker can be noticed
    if os.fork() == 0:
        os.execlp("kill", "kill", *(str(worker.pid) for worker in workers))
if __name__ == "__main__":
    with ds.Checkpointer(root, handle_sigterm=True, every=10**6, grace="10min", **OPTIONS) as ckpt:
        batches = iter(DataLoader(range(10**6), num_workers=2, multiprocessing_context={method!r}))
        for step, batch in enumerate(batches, 1):
            if step == 1:
                ckpt.snapshot(providers(1), step=1).wait_committed()
            if step == 3:
                end_all(batches._workers)
                if {method!r} == "spawn":
                    multiprocessing.connection.wait([worker.sentinel for worker in batches._workers])
                else:
                    for _ in range(9):  # more than were loaded ahead
                        next(batches)
            if ckpt.due(step):
                ckpt.snapshot(providers(step), step=step)
"""
    path = tmp_path / "loop.py"
    path.write_text(script)
    ended = run("-P", path, tmp_path / "c")
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert_holds(tmp_path / "c", 1, 3)


def test_the_workers_of_a_data_loader_end_with_the_program_or_at_its_wish(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    pytest.importorskip("torch")
    script = f"""
{PRELUDE}
import multiprocessing
from torch.utils.data import DataLoader
began = multiprocessing.Event()
class Stuck:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        began.set()
        time.sleep(1000)
with ds.Checkpointer(root, handle_sigterm=True, **OPTIONS) as ckpt:
    batches = iter(DataLoader(Stuck(), num_workers=1))
    worker = batches._workers[0]
    began.wait()
    worker.terminate()
    worker.join()
    print(worker.exitcode)
"""
    ended = run("-c", script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "0"


def test_the_error_of_a_data_loader_follows_the_signal(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{WORKER}
signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
with ds.Checkpointer(root, handle_sigterm=True, **OPTIONS) as ckpt:
    with held("sync"):
        ckpt.snapshot(providers(1), step=1)
        end_both()
    threading.Event().wait()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "mine\n"), ended.stderr
    assert ended.stderr.endswith("RuntimeError: a worker is killed by a signal\n")
    assert_holds(tmp_path, 1)


def test_the_log_says_that_an_announced_snapshot_is_not_taken(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{WORKER}
with ds.Checkpointer(root, handle_sigterm=True, every=10**6, grace="10min", **OPTIONS) as ckpt:
    ckpt.snapshot(providers(1), step=1).wait_committed()
    ckpt.due(2), ckpt.due(3)
    end_both()
    ckpt._last._bell.wait_for(lambda: ckpt._last._answer)
    raise RuntimeError("the loader has no more batches")
"""
    ended = run("-c", script, tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    announced, told = ended.stdout.splitlines()
    assert announced.startswith("SIGTERM: a last snapshot from step 4 on: ")
    assert told == "SIGTERM: no last snapshot: the loop has ended. Those in flight are finished"
    assert_holds(tmp_path, 1)


def test_no_last_snapshot_is_taken_if_it_would_be_cut_off(tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run("-c", LOOP.replace("GRACE", "1e-6"), tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert ended.stdout.startswith("SIGTERM: no last snapshot: it needs ")
    assert_holds(tmp_path, 1)
