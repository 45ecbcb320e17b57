"""What goes wrong while a checkpoint is saved costs the checkpoint only: training goes on, and nothing is left."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hold import GATE, held
from saves import AT_ONCE, WAYS, Failing, Save, state_of, stays
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from datastates import _native
from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.adapters.dcp.save import async_save
from datastates.errors import DatastatesError, StorageError
from datastates.files import staging
from datastates.saving import gate
from datastates.saving import snapshot as snapshots
from states import SMALL, big, copied, files, loaded, same, step

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["local", "global", "data"])
def test_a_planner_that_raises_frees_the_optimizer(
    tmp_path: Path, way: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, optimizer = big(tensors=2)
    writer = DataStatesStorageWriter(**SMALL)
    save = Save(way, writer, state_of(module, optimizer), tmp_path / "failed", planner=Failing(where))
    assert stays(module, optimizer) < AT_ONCE
    assert "my own reason" in str(save.error())
    assert not list((tmp_path / "failed").glob("*"))
    # the writer still saves, in every way
    for number, another in enumerate(WAYS):
        state = state_of(module, optimizer)
        Save(another, writer, state, tmp_path / str(number)).wait()
        same(loaded(tmp_path / str(number), state), state)
    writer.close()
    assert save.snapshot not in snapshots._silent


def test_without_an_optimizer_who_waits_is_let_go_too(tmp_path: Path) -> None:
    """No gate is passed: ``synchronize_staging()`` and the next save notice the failure by themselves."""
    module, optimizer = big(tensors=2)
    writer = DataStatesStorageWriter(tmp_path, **SMALL)  # no checkpoint_id: nothing resets it
    answer: Any = dcp.async_save(state_of(module, optimizer), storage_writer=writer, planner=Failing("local"))
    assert answer.exception() is not None
    writer.synchronize_staging()
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    same(loaded(tmp_path, {"w": torch.ones(2)}), {"w": torch.ones(2)})
    writer.close()


def test_a_failed_save_does_not_spoil_a_plain_one(tmp_path: Path) -> None:
    module, optimizer = big(tensors=2)
    writer = DataStatesStorageWriter(**SMALL)
    Save("thread", writer, state_of(module, optimizer), tmp_path / "failed", planner=Failing("local")).error()
    step(module, optimizer)
    state = state_of(module, optimizer)
    dcp.save(state, checkpoint_id=tmp_path / "next", storage_writer=writer)
    same(loaded(tmp_path / "next", state), state)
    writer.close()


def test_a_save_that_comes_too_late_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer has gone on, so the state is no longer that of the call."""
    module, optimizer = big(tensors=2)
    monkeypatch.setattr(staging, "_POLL", 0.01)
    writer = DataStatesStorageWriter(tmp_path, **SMALL)
    state = writer.stage(state_of(module, optimizer))
    assert writer._staged is not None
    writer._staged._latest = time.monotonic() + 0.1
    step(module, optimizer)  # it goes on, as no save has come
    with pytest.raises(CheckpointException, match="before its state was captured"):
        dcp.save(state, storage_writer=writer)
    assert files(tmp_path) == []
    writer.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_costs_the_checkpoint_only(tmp_path: Path, way: str) -> None:
    module, optimizer = big()
    writer = DataStatesStorageWriter(**SMALL)
    Save(way, writer, before := copied(state_of(module, optimizer)), tmp_path / "c").wait()
    _native.arm_fault("write", "fail", errno.ENOSPC)
    save = Save(way, writer, state_of(module, optimizer), tmp_path / "c")
    assert stays(module, optimizer) < AT_ONCE
    assert isinstance(error := save.error(), StorageError)
    assert error.errno == errno.ENOSPC
    _native.clear_faults()
    assert len(files(tmp_path / "c")) == 2
    same(loaded(tmp_path / "c", before), before)
    Save(way, writer, state := state_of(module, optimizer), tmp_path / "c").wait()
    same(loaded(tmp_path / "c", state), state)
    writer.close()


def test_two_saves_at_once_with_one_writer_are_refused(tmp_path: Path) -> None:
    module, optimizer = big()
    writer = DataStatesStorageWriter(**SMALL)
    state = state_of(module, optimizer)
    expected = copied(state)
    with held(until=GATE):
        first = Save("thread", writer, state, tmp_path / "first")
        with pytest.raises(DatastatesError, match="one at a time"):
            Save("thread", writer, state, tmp_path / "second")
        step(module, optimizer)
        assert first.soon_captured
    first.wait()
    with held("sync"):
        second = Save("thread", writer, state, tmp_path / "second")
        step(module, optimizer)
        assert second.soon_captured
        with pytest.raises(DatastatesError, match="one at a time"):
            Save("thread", writer, state, tmp_path / "elsewhere")
    second.wait()
    same(loaded(tmp_path / "first", expected), expected)
    assert (tmp_path / "second" / ".metadata").exists()
    assert not (tmp_path / "elsewhere").exists()
    Save("thread", writer, state := state_of(module, optimizer), tmp_path / "third").wait()
    same(loaded(tmp_path / "third", state), state)
    writer.close()


@pytest.mark.parametrize("way", WAYS)
def test_closing_waits_for_what_is_in_flight(tmp_path: Path, way: str) -> None:
    module, optimizer = big()
    writer = DataStatesStorageWriter(**SMALL)
    state = state_of(module, optimizer)
    for number in range(2):
        with held(until=(DataStatesStorageWriter, "close")):
            save = Save(way, writer, state, tmp_path / str(number))
            assert not save.captured
            writer.close()
            assert save.snapshot.persisted
        save.wait()
        same(loaded(tmp_path / str(number), state), state)
    assert writer._files is None
    writer.close()


@pytest.mark.by_hand
@pytest.mark.parametrize("way", [*WAYS, "plain"])
@pytest.mark.parametrize("how", ["good", "failed", "unplanned", "disagreed"])
def test_nothing_holds_the_state_once_it_has_ended(tmp_path: Path, way: str, how: str) -> None:
    module, optimizer = big(tensors=2)
    state: dict[str, Any] = {"model": dict(module.named_parameters()), "large": torch.ones(100_000)}
    alive = [weakref.ref(t) for t in (*module.parameters(), state["large"])]
    writer = DataStatesStorageWriter(**SMALL)
    where = {"unplanned": "local", "disagreed": "global"}.get(how)
    options = {"planner": Failing(where)} if where else {}
    if how == "failed":
        _native.arm_fault("write", "fail", errno.ENOSPC)
    if way == "plain":
        save: Any = None
        try:
            dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=writer, **options)  # type: ignore[arg-type]
        except CheckpointException:
            assert how != "good"
    else:
        save = Save(way, writer, state, tmp_path / "c", **options)
        if how == "good":
            save.wait()
        else:
            save.error()
    if way != "snapshot":
        save = None  # torch's future holds the error, and the error the frames of dcp.save
    options.clear()
    gate.pass_all()  # training goes on
    del module, optimizer, state
    end = time.monotonic() + 5
    while any(r() is not None for r in alive) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.02)
    assert [r() is None for r in alive] == [True] * 3
    del save
    writer.close()


def test_a_new_writer_for_each_save_leaves_nothing(tmp_path: Path) -> None:
    module, optimizer = big(tensors=2)
    state = state_of(module, optimizer)
    ours.async_save(state, tmp_path / "first", **SMALL).wait_committed()
    gc.collect()

    def held() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    for number in range(8):
        snapshot = ours.async_save(state, tmp_path / str(number), **SMALL)
        step(module, optimizer)
        snapshot.wait_committed()
        del snapshot
    # a save's own thread gives back what it held, after it has reported the commit
    end = time.monotonic() + 10
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < end, f"threads and files: {held()}, before: {before}, {threading.enumerate()}"
        gc.collect()
        time.sleep(0.02)


def test_a_planner_that_caches_is_refused_from_the_first_on(tmp_path: Path) -> None:
    snapshot = ours.async_save({"w": torch.ones(2)}, tmp_path, planner=DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(ValueError, match="caches plans itself"):
        snapshot.wait_committed()


def test_what_cannot_be_copied_is_raised_by_the_call(tmp_path: Path) -> None:
    writer = DataStatesStorageWriter(**SMALL)
    with pytest.raises(TypeError, match="pickle"):
        ours.async_save({"lock": threading.Lock(), "w": torch.ones(100_000)}, tmp_path / "0", storage_writer=writer)
    state = {"w": torch.ones(100_000)}
    ours.async_save(state, tmp_path / "1", storage_writer=writer).wait_committed()
    same(loaded(tmp_path / "1", state), state)
    writer.close()


def test_a_call_that_was_interrupted_is_no_failure_that_nobody_was_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, begin, save = threading.Event(), async_save.Session._begin, async_save.Session.save_staged

    def begin_later(*words: Any) -> Any:
        left.wait()
        return begin(*words)

    def interrupted(*words: Any) -> None:
        save(*words)
        raise KeyboardInterrupt

    monkeypatch.setattr(async_save.Session, "_begin", begin_later)
    monkeypatch.setattr(async_save.Session, "save_staged", interrupted)
    writer = DataStatesStorageWriter(**SMALL)
    try:
        with pytest.raises(KeyboardInterrupt):
            ours.async_save({"w": torch.ones(100_000)}, tmp_path, storage_writer=writer)
    finally:
        left.set()
    writer.close()
    assert not snapshots._silent


@pytest.mark.by_hand
def test_a_failure_that_nobody_asks_for_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import sys, torch
                from datastates import _native
                from datastates.adapters import dcp
                _native.arm_fault("write", "fail", 28)
                dcp.async_save({"w": torch.ones(100_000)}, sys.argv[1], host_cache="2MiB", block="1MiB")
                """
            ),
            tmp_path,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 120, done.stderr
    assert "nobody asked" in done.stderr
    assert "No space left on device" in done.stderr
    assert files(tmp_path) == []
    del caplog


@pytest.mark.by_hand
def test_the_interpreters_end_waits_for_the_commit(tmp_path: Path) -> None:
    source = """
        import sys, torch
        import torch.distributed.checkpoint as dcp
        from datastates.adapters import dcp as ours
        sys.path.insert(0, sys.argv[2])
        from hold import hold_until_exit
        hold_until_exit("sync")
        state = {"w": torch.arange(100_000.0), "n": 5}
        ours.async_save(state, sys.argv[1] + "/snapshot", host_cache="2MiB", block="1MiB")
        writer = ours.DataStatesStorageWriter(sys.argv[1] + "/thread", host_cache="2MiB", block="1MiB")
        dcp.async_save(state, storage_writer=writer)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), tmp_path, Path(__file__).parents[2] / "support"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    state = {"w": torch.arange(100_000.0), "n": 5}
    for name in ("snapshot", "thread"):
        same(loaded(tmp_path / name, state), state)


@pytest.mark.by_hand
def test_a_forked_child_waits_for_nothing(tmp_path: Path) -> None:
    source = """
        import os, sys, time, torch
        from datastates import _native
        from datastates.adapters import dcp as ours
        p = torch.nn.Parameter(torch.ones(1 << 20))
        optimizer = torch.optim.SGD([p], lr=0.1)
        writer = ours.DataStatesStorageWriter(sys.argv[1], host_cache="2MiB", block="1MiB")
        _native.arm_fault("write", "delay", 60_000)
        staged = writer.stage({"p": p})
        snapshot = ours.async_save({"p": p}, sys.argv[1], storage_writer=ours.DataStatesStorageWriter(
            host_cache="2MiB", block="1MiB"))
        child = os.fork()
        if not child:
            begin = time.monotonic()
            p.grad = torch.ones_like(p)
            optimizer.step()
            os._exit(0 if time.monotonic() - begin < 20 else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, code
        _native.clear_faults()
        writer._staged.give_up(RuntimeError("no save"))
        writer._staged.snapshot.exception()
        snapshot.wait_committed()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # OpenMP's threads do not outlive a fork
    )
    assert done.returncode == 0, done.stderr


def test_staged_state_does_not_leave_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``AsyncCheckpointerType.PROCESS`` first pickles the state, which would move it to shared memory."""
    import pickle
    from multiprocessing.reduction import ForkingPickler

    module, optimizer = big(tensors=2)
    for writer in (DataStatesStorageWriter(tmp_path, **SMALL), DataStatesStorageWriter(tmp_path, **SMALL)):
        state = writer.stage(state_of(module, optimizer))
        with pytest.raises(DatastatesError, match="DefaultStager"):
            ForkingPickler.dumps([state, writer])
        assert stays(module, optimizer) < AT_ONCE
        assert not any(p.is_shared() for p in module.parameters())
        another = pickle.loads(pickle.dumps(writer))
        dcp.save({"w": torch.ones(3)}, storage_writer=another)
        another.close()
        writer.close()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR and r.name == "datastates"]
