"""A failed save is finalized on no rank; a save whose worker process died is finalized, if it did not fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BEGIN = """
import psutil

directory, layout = Path(sys.argv[1]), Layout(tp=2)

def fails(action, error, text, *, on):
    # with the error itself where it happened, and with its text on the other rank
    with pytest.raises(error if rank() == on else CommitError, match=text) as caught:
        action()
    assert rank() == on or f"rank {on}" in str(caught.value), caught.value

def nothing(directory):
    dist.barrier()
    assert not finished(directory) and not (directory / ".metadata").exists() and not files_of_ranks(directory)
"""


@pytest.mark.by_hand
# a persistent worker imports Megatron-Core anew
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.by_hand)])
def test_a_full_disk_on_one_rank(run: Any, tmp_path: Path, persistent: bool) -> None:
    run(
        2,
        BEGIN
        + f"""
strategy, queue = Ours.save(), AsyncCallsQueue(persistent={persistent})
for broken in (0, 1):
    where = directory / str(broken)
    with fault("write", "fail", 28, on=broken):
        request = save(state(layout, 0), where, strategy, async_sharded_save=True)
        request.add_finalize_fn(lambda: (where / "latest").touch())
        queue.schedule_async_request(request)
        fails(lambda: queue.maybe_finalize_async_calls(blocking=True), StorageError, "No space left", on=broken)
    nothing(where)
    assert not (where / "latest").exists()
    with fault("write", "fail", 28, on=broken):
        fails(lambda: save(state(layout, 0), where, strategy), StorageError, "No space left", on=broken)
    nothing(where)
# and on it goes, into the same place
queue.schedule_async_request(save(state(layout, 1), directory / "1", strategy, async_sharded_save=True))
queue.maybe_finalize_async_calls(blocking=True)
loaded_as(layout, 1, directory / "1", Stock.load())
queue.close()
""",
        tmp_path,
    )


@pytest.mark.long
def test_what_fails_before_and_after_the_files(run: Any, tmp_path: Path) -> None:
    run(
        2,
        BEGIN
        + """
strategy = Ours.save()
# one rank cannot describe its part: Megatron's own error, as data, though the queue has not run anything yet
made = state(layout, 0)["layers"]
if rank() == 1:
    made[0].data = None
together(lambda: (directory / "described").mkdir())
request = strategy.async_save(made, directory / "described")
fails(request.execute_sync, Exception, "`data` attr is None", on=1)
nothing(directory / "described")

# the files are there, and the coordinator cannot make them a checkpoint
if rank() == 0:
    arm("store.rename", "fail", 5)
request = save(state(layout, 0), directory / "committed", strategy, async_sharded_save=True)
with pytest.raises(CommitError, match="rename .*metadata"):
    request.execute_sync()
nothing(directory / "committed")
save(state(layout, 0), directory / "after", strategy)
loaded_as(layout, 0, directory / "after", Ours.load())
""",
        tmp_path,
    )


@pytest.mark.long
def test_a_worker_that_is_killed_does_not_matter(run: Any, tmp_path: Path) -> None:
    run(
        2,
        BEGIN
        + """
strategy, queue = Ours.save(), AsyncCallsQueue()
with held("sync"):
    queue.schedule_async_request(save(state(layout, 0), directory / "0", strategy, async_sharded_save=True))
    (worker,) = psutil.Process().children()
    worker.kill()
queue.maybe_finalize_async_calls(blocking=True)
assert finished(directory / "0")
loaded_as(layout, 0, directory / "0", Stock.load())
""",
        tmp_path,
    )


@pytest.mark.by_hand
@pytest.mark.parametrize("persistent", [False, True])
def test_a_rank_that_is_killed(run: Any, tmp_path: Path, said: Any, persistent: bool) -> None:
    done = run(
        2,
        BEGIN
        + f"""
strategy, queue = Ours.save(rank_timeout=5), AsyncCallsQueue(persistent={persistent})
save(state(layout, 0), directory / "0", strategy)
native.arm_fault("sync", "delay", 60_000)
queue.schedule_async_request(save(state(layout, 1), directory / "1", strategy, async_sharded_save=True))
workers = [None, None]
dist.all_gather_object(workers, psutil.Process().children()[-1].pid)
say("worker", workers[rank()])
if rank() == 1:
    os.kill(os.getpid(), 9)
native.clear_faults()
from datastates.saving.snapshot import wait_ended
wait_ended([strategy.last])
error = strategy.last.exception()
assert "rank 1" in str(error), error
assert not finished(directory / "1") and not (directory / "1" / ".metadata").exists()
if not {persistent}:
    # nobody would have ended the worker of the killed rank
    wait_for(lambda: not psutil.pid_exists(workers[1]) or psutil.Process(workers[1]).status() == "zombie", "worker")
sys.stdout.flush()
os._exit(0)
""",
        tmp_path,
        may_fail=[1],
    )
    assert done[1].returncode == -signal.SIGKILL
    run(1, "loaded_as(Layout(), 0, Path(sys.argv[1]) / '0', Ours.load())", tmp_path)


# --- the lock by itself, without Megatron and without ranks

HOLDER = """
import sys, time
from datastates.adapters.megatron.async_request import token
from datastates.saving.snapshot import Snapshot, reach

snapshot = Snapshot(0, 0, 0.0)
print(token(snapshot), flush=True)
sys.stdin.readline()
reach(snapshot, "committed")
sys.stdin.readline()
"""
WAITER = """
import sys
from datastates.adapters.megatron.async_request import wait_for

print("waits", flush=True)
wait_for(sys.argv[1])
print("done", flush=True)
"""


def _python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.by_hand
@pytest.mark.parametrize("how", [pytest.param("ended", marks=pytest.mark.by_hand), "killed"])
def test_who_waits_is_woken(how: str) -> None:
    with _python(HOLDER) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        name = holder.stdout.readline().strip()
        with _python(WAITER, name) as waiter:
            assert waiter.stdout is not None
            assert waiter.stdout.readline() == "waits\n"
            time.sleep(0.5)
            assert waiter.poll() is None, "it did not wait"
            if how == "killed":
                holder.kill()
            else:
                holder.stdin.write("\n")
                holder.stdin.flush()
            assert waiter.stdout.readline() == "done\n"
        if how == "ended":
            assert not Path(name).exists()
            with _python(WAITER, name) as late:  # whoever comes later does not wait
                assert late.wait(60) == 0
        holder.kill()
    if how == "killed":
        os.unlink(name)
