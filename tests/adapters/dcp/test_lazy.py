"""Training goes on while a checkpoint is saved: optimizers wait for the capture and no longer."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hold import END, GATE, held
from saves import AT_ONCE, WAYS, Save, state_of, stays
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from datastates import _native
from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.errors import TornSnapshotError
from datastates.files import samples
from states import SMALL, big, copied, files, loaded, same, step

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")


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


@pytest.mark.parametrize("change", [torch.Tensor.zero_, lambda tensor: tensor.data.mul_(2)], ids=["counted", "data"])
def test_what_is_changed_before_the_save_has_begun_is_named(tmp_path: Path, change: Any) -> None:
    """The change comes between staging and planning. torch does not count what is done to ``.data``."""
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
            change(module.get_parameter("p1"))
        changed.set()
        assert isinstance(error := save.error(), TornSnapshotError)
        assert "p1" in str(error)
        writer.close()


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


def test_torchs_store_does_not_grow_with_each_folder(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
from in_ranks import wait_for

root = Path(sys.argv[1])
store = dist.distributed_c10d._get_default_store()

def is_closed():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("datastates")]

def keys():
    dist.barrier()  # before and after: the other rank must not save meanwhile
    counted = store.num_keys()
    dist.barrier()
    return counted

counts = []
for number in range(4):
    ours.async_save({"w": torch.full((4,), float(number))}, root / f"folder-{number}").wait_committed()
    wait_for(is_closed, "the session to close")
    counts.append(keys())
assert len(set(counts)) == 1, counts
""",
        tmp_path / "saved",
    )


def test_a_dtensor_that_is_changed_is_named(train: Any, tmp_path: Path) -> None:
    """An operation on a DTensor counts in the version of the DTensor, not in that of its local tensor."""
    train(
        2,
        """
from hold import held
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from datastates.errors import DatastatesError

root = Path(sys.argv[1])
mesh = init_device_mesh("cpu", (2,))
changed = threading.Event()

class Slow(DefaultSavePlanner):
    def set_up_planner(self, *arguments, **options):
        changed.wait(60)
        super().set_up_planner(*arguments, **options)

def named(snapshot):
    try:
        snapshot.wait_committed()
    except DatastatesError as error:
        assert "model.big" in str(error) and "changed between" in str(error), error
    else:
        raise AssertionError("another state was committed")

for number, placement in enumerate((Shard(0), Replicate())):
    tensor = distribute_tensor(torch.ones(1024, 256), mesh, [placement])
    state = {"model": {"big": tensor.detach()}}
    folder = root / str(number)

    changed.clear()  # all of it, between the call and the plan
    snapshot = ours.async_save(state, folder, planner=Slow())
    tensor.mul_(2)
    changed.set()
    named(snapshot)
    dist.barrier()

    with held("capture"):  # one row
        snapshot = ours.async_save(state, folder)
        tensor[3:4].add_(1)
    named(snapshot)
    dist.barrier()

    snapshot = ours.async_save(state, folder)
    snapshot.wait_committed()
    read = {"model": {"big": torch.zeros_like(tensor)}}
    dcp.load(read, checkpoint_id=folder)
    assert torch.equal(read["model"]["big"].to_local(), tensor.to_local())
""",
        tmp_path,
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(70_000.0),
        torch.arange(70_000.0).view(7, 100, 100).permute(2, 0, 1),
        torch.arange(140_000.0, dtype=torch.float64).view(200, 700)[:, ::3],
        torch.arange(70_000.0).to(torch.complex64),
        torch.arange(70_000.0).to(torch.float8_e4m3fn),
        torch.ones(70_000, dtype=torch.bool),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(5.0),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_samples_tell_what_was_rewritten(tensor: torch.Tensor) -> None:
    tensors = [torch.ones(9), tensor, torch.empty(0), tensor[..., :1] if tensor.ndim else tensor.clone()]
    before = samples.take(tensors)
    assert samples.differences(before, samples.take(tensors)) == []
    assert max(Counter(number for numbers, _ in before for number in numbers).values()) <= 2 * samples.WORDS
    tensor.data.zero_()
    assert 1 in samples.differences(before, samples.take(tensors))
    assert 0 not in samples.differences(before, samples.take(tensors))
