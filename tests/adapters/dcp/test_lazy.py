"""Training goes on while a checkpoint is saved: optimizers wait for the capture and no longer, whatever goes wrong."""

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
from hold import END, GATE, held
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from datastates import _native
from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStager, DataStatesStorageWriter
from datastates.adapters.dcp.save import staging
from datastates.errors import DatastatesError, StorageError, TornSnapshotError
from datastates.saving import gate
from datastates.saving import snapshot as snapshots
from states import SMALL, big, copied, files, loaded, same, step

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
WAYS = ["thread", "stager", "snapshot"]
AT_ONCE = 20.0
"""Seconds within which a failed save must let training go on."""


class Save:
    """One save, begun in one of three ways."""

    def __init__(self, way: str, writer: DataStatesStorageWriter, state: dict[str, Any], path: Path, **options: Any):
        self.way = way
        self.snapshot: Any = None
        if way == "snapshot":
            self.snapshot = ours.async_save(state, path, storage_writer=writer, **options)
            return
        hold = writer.hold

        def held(state_dict: dict[str, Any]) -> Any:
            staged = hold(state_dict)
            self.snapshot = staged.snapshot
            return staged

        writer.hold = held  # type: ignore[method-assign]
        options = {**options, "checkpoint_id": path, "storage_writer": writer}
        if way == "thread":
            self.done = dcp.async_save(state, **options)
        else:
            answer = dcp.async_save(state, async_stager=DataStatesStager(writer), **options)
            assert isinstance(answer, AsyncSaveResponse)
            self.done, self.staged = answer.upload_completion, answer.staging_completion
        del writer.hold

    @property
    def captured(self) -> bool:
        return bool(self.snapshot.captured)

    @property
    def soon_captured(self) -> bool:
        """Whether the snapshot is captured, now or soon: the native core lets an optimizer go a moment earlier."""
        end = time.monotonic() + 5
        while not self.captured and time.monotonic() < end:
            time.sleep(0.002)
        return self.captured

    def wait(self) -> None:
        if self.way == "snapshot":
            self.snapshot.wait_committed()
        else:
            self.done.result()

    def error(self) -> BaseException:
        """The error of the save, without torch's wrapping."""
        with pytest.raises(BaseException) as raised:  # noqa: PT011 torch's is no Exception
            self.wait()
        if isinstance(raised.value, CheckpointException):
            ((found, _),) = raised.value.failures.values()
            return found  # type: ignore[no-any-return]
        return raised.value


def state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": module.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}


def stays(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """How long an optimizer's step takes, in seconds."""
    begin = time.monotonic()
    step(module, optimizer)
    return time.monotonic() - begin


class Failing(DefaultSavePlanner):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def create_local_plan(self) -> Any:
        if self._where == "local":
            raise ValueError("no local plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        if self._where == "global":
            raise ValueError("no global plan")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: Any) -> Any:
        if self._where == "data":
            raise ValueError("no data")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("way", WAYS)
def test_the_contents_are_those_of_the_call(tmp_path: Path, way: str) -> None:
    module, optimizer = big()
    writer = DataStatesStorageWriter(**SMALL)
    for number in range(2):
        state = state_of(module, optimizer)
        expected = copied(state)
        with held(until=GATE):
            save = Save(way, writer, state, tmp_path / str(number))
            assert not save.captured, "nothing was left to capture"
            step(module, optimizer)
            assert save.soon_captured, "the step did not wait for the capture"
        step(module, optimizer)
        save.wait()
        same(loaded(tmp_path / str(number), expected), expected)
        same(loaded(tmp_path / str(number), expected, "stock"), expected)
    assert save.snapshot.report.gate_seconds > 0
    writer.close()


@pytest.mark.parametrize("way", WAYS)
def test_no_step_waits_for_the_storage(tmp_path: Path, way: str) -> None:
    module, optimizer = big(tensors=1)
    writer = DataStatesStorageWriter(tmp_path, host_cache="16MiB", block="1MiB")
    with held("sync"):
        save = Save(way, writer, state_of(module, optimizer), tmp_path)
        step(module, optimizer)
        step(module, optimizer)
        assert save.soon_captured
        assert not save.snapshot.persisted
    save.wait()
    assert files(tmp_path) == [".metadata", "__0_0.distcp"]
    writer.close()


def test_a_response_tells_when_the_state_is_staged(tmp_path: Path) -> None:
    module, optimizer = big()
    writer = DataStatesStorageWriter(tmp_path, **SMALL)
    with held():
        save = Save("stager", writer, state_of(module, optimizer), tmp_path)
        assert not save.staged.done()
    save.staged.result(timeout=30)  # as torchtitan waits, before the step
    assert save.captured
    step(module, optimizer)
    save.wait()
    assert save.snapshot.report.gate_seconds == 0
    writer.close()


def test_what_is_small_or_no_tensor_may_change_at_once(tmp_path: Path) -> None:
    for way in WAYS:
        module, optimizer = big(tensors=3)
        state = {
            **state_of(module, optimizer),
            "small": torch.ones(5),
            "list": [1, {"a": torch.ones(2)}],
            "o": {"n": 1},
        }
        expected = copied(state)
        writer = DataStatesStorageWriter(tmp_path / way, **SMALL)
        with held():
            save = Save(way, writer, state, tmp_path / way)
            state["small"].zero_()
            state["list"][1]["a"].zero_()
            state["list"].append(5)
            state["o"]["n"] = 2
            state["optim"]["param_groups"][0]["lr"] = 7.0
        save.wait()
        same(loaded(tmp_path / way, expected), expected)
        writer.close()


def test_buffers_of_modules_are_copied_at_once(tmp_path: Path) -> None:
    """However large they are: a forward pass changes them, and no optimizer's gate delays it."""
    norm = torch.nn.BatchNorm1d(200_000)
    other, _ = big(tensors=3)
    module = torch.nn.ModuleDict({"norm": norm, "other": other})
    expected = copied(module.state_dict())
    writer = DataStatesStorageWriter(tmp_path, **SMALL)
    with held():
        snapshot = ours.async_save({"model": module}, tmp_path, storage_writer=writer)
        norm(torch.randn(3, 200_000))
        assert not snapshot.captured
    snapshot.wait_committed()
    same(loaded(tmp_path, {"model": expected}), {"model": expected})
    writer.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_changed_by_hand_is_named(tmp_path: Path, way: str) -> None:
    module, optimizer = big()
    Save(way, writer := DataStatesStorageWriter(tmp_path, **SMALL), state_of(module, optimizer), tmp_path).wait()
    before = copied(state_of(module, optimizer))
    with held(), torch.no_grad():
        save = Save(way, writer, state_of(module, optimizer), tmp_path)
        module.get_parameter("p2").add_(1)
    error = save.error()
    assert isinstance(error, TornSnapshotError)
    assert "p2" in str(error)
    same(loaded(tmp_path, before), before)
    assert stays(module, optimizer) < AT_ONCE
    assert len(files(tmp_path)) == 2
    writer.close()


def test_what_is_changed_before_the_save_has_begun_is_named(tmp_path: Path) -> None:
    """The change comes between staging and planning."""
    module, optimizer = big()

    class Slow(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            changed.wait(10)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    for way in WAYS:
        changed = threading.Event()
        writer = DataStatesStorageWriter(**SMALL)
        save = Save(way, writer, state_of(module, optimizer), tmp_path / way, planner=Slow())
        with torch.no_grad():
            module.get_parameter("p1").zero_()
        changed.set()
        assert isinstance(error := save.error(), TornSnapshotError)
        assert "p1" in str(error)
        writer.close()


# --- what goes wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["local", "global", "data"])
def test_a_planner_that_raises_frees_the_optimizer(
    tmp_path: Path, way: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, optimizer = big(tensors=2)
    writer = DataStatesStorageWriter(**SMALL)
    save = Save(way, writer, state_of(module, optimizer), tmp_path / "failed", planner=Failing(where))
    assert stays(module, optimizer) < AT_ONCE
    assert f"no {where}" in str(save.error())
    if way == "stager":
        save.staged.result(timeout=AT_ONCE)  # a caller that waits for the staging may go on, too
    assert not list((tmp_path / "failed").glob("*"))
    # the writer still saves, in every way
    for number, another in enumerate(WAYS):
        state = state_of(module, optimizer)
        Save(another, writer, state, tmp_path / str(number)).wait()
        same(loaded(tmp_path / str(number), state), state)
    writer.close()
    assert save.snapshot not in snapshots._silent


@pytest.mark.parametrize("way", ["thread", "stager"])
def test_without_an_optimizer_who_waits_is_let_go_too(tmp_path: Path, way: str) -> None:
    """No gate is passed: the stager, ``synchronize_staging()`` and the next save notice the failure by themselves."""
    module, optimizer = big(tensors=2)
    writer = DataStatesStorageWriter(tmp_path, **SMALL)  # no checkpoint_id: nothing resets it
    options = {"async_stager": DataStatesStager(writer)} if way == "stager" else {}
    answer: Any = dcp.async_save(
        state_of(module, optimizer), storage_writer=writer, planner=Failing("local"), **options
    )
    if way == "stager":
        answer.staging_completion.result(timeout=AT_ONCE)
        answer = answer.upload_completion
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


@pytest.mark.parametrize("way", ["thread", "stager"])
def test_two_saves_at_once_with_one_writer_are_refused(tmp_path: Path, way: str) -> None:
    module, optimizer = big()
    writer = DataStatesStorageWriter(**SMALL)
    state = state_of(module, optimizer)
    expected = copied(state)
    with held(until=GATE):
        first = Save(way, writer, state, tmp_path / "first")
        with pytest.raises(DatastatesError, match="one at a time"):
            Save(way, writer, state, tmp_path / "second")
        step(module, optimizer)
        assert first.soon_captured
    first.wait()
    with held("sync"):
        second = Save(way, writer, state, tmp_path / "second")
        step(module, optimizer)
        assert second.soon_captured
        with pytest.raises(DatastatesError, match="one at a time"):
            Save(way, writer, state, tmp_path / "elsewhere")
    second.wait()
    same(loaded(tmp_path / "first", expected), expected)
    assert (tmp_path / "second" / ".metadata").exists()
    assert not (tmp_path / "elsewhere").exists()
    Save(way, writer, state := state_of(module, optimizer), tmp_path / "third").wait()
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
    assert writer._executor is None
    writer.close()


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


def test_several_snapshots_are_in_flight(tmp_path: Path) -> None:
    module, optimizer = big(tensors=2)
    writer = DataStatesStorageWriter(host_cache="16MiB", block="1MiB")
    taken, expected = [], []
    with held("sync", until=END):  # the third waits for the first
        for number in range(4):
            assert number > 2 or not any(snapshot.committed for snapshot in taken)
            state = state_of(module, optimizer)
            expected.append(copied(state))
            taken.append(ours.async_save(state, tmp_path / str(number), storage_writer=writer, step=number))
            step(module, optimizer)
    for snapshot in taken:
        snapshot.wait_committed()
    for number, state in enumerate(expected):
        same(loaded(tmp_path / str(number), state), state)
        assert (taken[number].step, taken[number].path) == (number, tmp_path / str(number))
    writer.close()


def test_the_last_of_several_to_one_place_stands(tmp_path: Path) -> None:
    writer = DataStatesStorageWriter(host_cache="16MiB", block="1MiB")
    for attempt in range(5):
        taken = []
        for number in range(3):
            if number < 2:
                _native.arm_fault("sync", "delay", 60 * (2 - number), 1, 1)
            state = {"w": torch.full((300_000 // (number + 1),), float(number))}
            taken.append(ours.async_save(state, tmp_path, storage_writer=writer))
        for snapshot in taken:
            snapshot.wait_committed()
        same(loaded(tmp_path, state), state)
        assert len(files(tmp_path)) == 2, (attempt, files(tmp_path))
    writer.close()


def test_a_structure_may_change_from_save_to_save(tmp_path: Path) -> None:
    writer = DataStatesStorageWriter(**SMALL)
    states: list[dict[str, Any]] = [
        {"a": torch.ones(50_000), "b": 3},
        {"a": torch.zeros(50_000), "b": 4},
        {"a": torch.ones(40_000), "c": torch.ones(3)},
        {"c": {"deep": torch.ones(70_000)}, "b": "text"},
        {"a": torch.ones(50_000), "b": 3},
    ]
    for number, state in enumerate(states):
        for way in WAYS:
            path = tmp_path / f"{number}-{way}"
            Save(way, writer, state, path).wait()
            same(loaded(path, state), state)
    writer.close()


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
