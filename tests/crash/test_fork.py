"""Forks after construction: parent and child each go on by themselves, and both end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.commit import fence, newest
from datastates.commit.tiers import tier_of
from datastates.providers import from_state_dict

PRELUDE = """
import faulthandler, os, signal, sys, time
import numpy as np
import datastates as ds
from datastates import _native
from datastates.commit import newest
from datastates.errors import SnapshotAbandonedError
from datastates.providers import HostTensorProvider

root = sys.argv[1]
OPTIONS = dict(host_cache="2MiB", block="1MiB")
def arrays(step): return {"a": np.full(500_000, step, np.float64)}
def providers(step): return [HostTensorProvider("model", arrays(step), lazy=True)]
def restores(ckpt, step):
    live = arrays(0)
    assert ckpt.restore([HostTensorProvider("model", live)], step=step).step == step
    assert np.array_equal(live["a"], arrays(step)["a"]), live["a"][0]
def fork(child):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(100, exit=True)  # ends a child that hangs
        _native.clear_faults()  # what its parent is held up by
        child()
        sys.exit(0)
    return pid
def ended_well(pid):
    assert os.waitpid(pid, 0)[1] == 0
"""

IN_THE_CHILD = {
    "nothing": "def child(): pass",
    "restore": "def child(): restores(ckpt, 1)",
    "snapshot": "def child():\n    ckpt.snapshot(providers(10), step=10).wait_committed()\n    restores(ckpt, 10)",
    "snapshot and no close": "def child(): ckpt.snapshot(providers(10), step=10)",
    "close": "def child():\n    ckpt.snapshot(providers(10), step=10)\n    ckpt.close()",
    "close alone": "def child(): ckpt.close()",
    "its own": (
        "def child():\n"
        "    with ds.Checkpointer(root + '/child', **OPTIONS) as own:\n"
        "        own.snapshot(providers(10), step=10)\n"
        "        own.wait()\n"
        "        restores(own, 10)"
    ),
}
STEPS_OF_THE_CHILD = {"snapshot": [10], "snapshot and no close": [10], "close": [10]}


@pytest.mark.by_hand
@pytest.mark.parametrize("work", IN_THE_CHILD)
def test_a_child_uses_the_inherited_checkpointer_and_ends(
    work: str, backend: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{PRELUDE}
{IN_THE_CHILD[work]}
with ds.Checkpointer(root, io_backend={backend!r}, **OPTIONS) as ckpt:
    ckpt.snapshot(providers(1), step=1).wait_committed()
    ended_well(fork(child))
    restores(ckpt, 1)
    ckpt.snapshot(providers(2), step=2).wait_committed()
    restores(ckpt, 2)
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(newest.committed(tier_of(tmp_path))) == [1, 2, *STEPS_OF_THE_CHILD.get(work, [])]
    assert tier_of(tmp_path).debris() == []


def test_a_multiprocessing_child_uses_the_inherited_checkpointer(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
import multiprocessing
def child():
    restores(ckpt, 1)
    ckpt.snapshot(providers(10), step=10).wait_committed()
with ds.Checkpointer(root, **OPTIONS) as ckpt:
    ckpt.snapshot(providers(1), step=1).wait_committed()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    ckpt.snapshot(providers(2), step=2).wait_committed()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(newest.committed(tier_of(tmp_path))) == [1, 2, 10]


def test_a_child_reads_by_itself_what_its_parent_was_reading_ahead(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
state = {{f"w{{i}}": np.full(200_000, float(i)) for i in range(9)}}
ds.snapshot([HostTensorProvider("m", state)], root + "/c").wait_committed()
def check(i): assert (opened[f"m/w{{i}}"] == i).all(), i
def child():
    for i in range(3, 9): check(i)
with ds.open(root + "/c", **OPTIONS) as opened:
    check(0)
    check(1)
    for batch, _ in opened._ahead._window.values():
        for job in batch._reads._jobs: job.wait()
    _native.arm_fault("read", "delay", 60_000, count=0)
    check(2)
    assert "m/w6" in opened._ahead._window
    pid = fork(child)
    ended_well(pid)
    _native.clear_faults()
    for i in range(3, 9): check(i)
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


IN_FLIGHT = f"""
{PRELUDE}
_native.arm_fault("sync", "delay", 60_000)
ckpt = ds.Checkpointer(root, **OPTIONS)
begun = ckpt.snapshot(providers(1), step=1)
begun.wait_captured()
"""


@pytest.mark.long
@pytest.mark.parametrize("wait", ["wait_persisted", "wait_committed"])
def test_a_snapshot_begun_before_the_fork_is_abandoned_in_the_child_and_committed_by_the_parent(
    wait: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{IN_FLIGHT}
def child():
    try:
        begun.{wait}()
    except SnapshotAbandonedError as error:
        assert "1" in str(error)
    else:
        sys.exit(5)
    assert not begun.committed
    ckpt.gate()
    ckpt.wait()
    ckpt.snapshot(providers(2), step=2).wait_committed()
    restores(ckpt, 2)
    ckpt.close()
ended_well(fork(child))
_native.clear_faults()
begun.wait_committed()
ckpt.close()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(newest.committed(tier_of(tmp_path))) == [1, 2]
    assert tier_of(tmp_path).debris() == []


@pytest.mark.parametrize("point", ["write", "sync"])
def test_a_child_that_forgets_an_abandoned_snapshot_goes_on(
    point: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{PRELUDE}
import gc, glob
_native.arm_fault({point!r}, "delay", 60_000)
ckpt = ds.Checkpointer(root, **OPTIONS)
begun = ckpt.snapshot(providers(1), step=1)
while not glob.glob(root + "/step-00000001.partial-*/rank-*"):  # its folder is locked then
    time.sleep(0.001)
def child():
    global begun
    _native.clear_faults()
    begun = None
    gc.collect()
    ckpt.snapshot(providers(2), step=2).wait_committed()
    gc.collect()
ended_well(fork(child))
_native.clear_faults()
begun.wait_committed()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(newest.committed(tier_of(tmp_path))) == [1, 2]


def test_a_child_that_exits_at_once_does_not_disturb_the_snapshot_in_flight(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{IN_FLIGHT}
for _ in range(3):
    ended_well(fork(lambda: None))
assert not begun.committed
_native.clear_faults()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(newest.committed(tier_of(tmp_path))) == [1]


def test_an_abandoned_snapshot_counts_as_no_failure_in_the_child(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{IN_FLIGHT}
def child():
    ckpt.snapshot(providers(2), step=2).wait_committed()
    ckpt.close()
    assert ckpt.failures == 0, ckpt.failures
ended_well(fork(child))
_native.clear_faults()
ckpt.close()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_child_that_lives_on_does_not_keep_retention_from_deleting(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{PRELUDE}
_native.arm_fault("sync", "delay", 60_000)
ckpt = ds.Checkpointer(root, keep_last=1, **OPTIONS)
ckpt.snapshot(providers(1), step=1)
worker = fork(lambda: time.sleep(60))  # as a data loader's worker does
_native.clear_faults()
ckpt.wait()
ckpt.snapshot(providers(2), step=2)
ckpt.close()
print(os.listdir(root))
os.kill(worker, signal.SIGKILL)
os.waitpid(worker, 0)
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "['step-00000002']\n"


def test_a_child_holds_no_ring_and_no_file_of_its_parent(backend: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
{IN_FLIGHT.replace("**OPTIONS", f"io_backend={backend!r}, **OPTIONS")}
def held():
    descriptors = [f"/proc/self/fd/{{name}}" for name in os.listdir("/proc/self/fd")]
    opened = [os.readlink(path) for path in descriptors if os.path.lexists(path)]
    mapped = [line.split(maxsplit=5)[-1] for line in open("/proc/self/maps")]
    return [name for name in opened + mapped if root in name or "io_uring" in name or "eventfd" in name]
def child(): assert held() == [], held()
assert any(name.endswith(".pt") for name in held())
ended_well(fork(child))
_native.clear_faults()
ckpt.close()
"""
    ended = run("-c", script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_a_killed_parent_left_is_debris_though_its_child_lives_on(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    script = f"""
{PRELUDE}
_native.arm_fault("sync", "delay", 60_000)
ckpt = ds.Checkpointer(root, **OPTIONS)
ckpt.snapshot(providers(1), step=1).wait_captured()
fork(lambda: (print("forked", flush=True), time.sleep(60)))
time.sleep(60)
"""
    parent = start("-c", script, tmp_path)
    assert parent.stdout.readline() == "forked\n"  # says the child, which has let go of what it inherited
    assert tier_of(tmp_path).debris() == []
    parent.kill()
    parent.wait()
    assert len(tier_of(tmp_path).debris()) == 1
    with ds.Checkpointer(tmp_path) as ckpt:
        ckpt.snapshot([from_state_dict("s", {"a": np.ones(3)})], step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [fence.FOLDER, "step-00000002"]
