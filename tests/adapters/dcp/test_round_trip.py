"""A load gives what was saved, for each way to save and each reader."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.planner import SavePlanner

from datastates import _native
from datastates._base import faults
from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStorageReader, DataStatesStorageWriter, metadata_file
from datastates.adapters.dcp.save.items import Written
from datastates.errors import CommitError, ProviderError, SettingsError, StorageError
from datastates.storage import Location
from datastates.storage.local import LocalStore
from states import SMALL, Parts, copied, every_kind, files, loaded, problems, same, save_with

HOW = ["stock", "ours", "thread", "snapshot"]
OURS = HOW[1:]
# torch warns of every save over another checkpoint, and of rare element types
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.mark.parametrize("how", HOW)
def test_every_kind_of_state(tmp_path: Path, how: str) -> None:
    state = every_kind()
    save_with(how, state, tmp_path)
    for reader in ("stock", "ours"):
        same(loaded(tmp_path, state, reader), every_kind())
    if how != "stock":
        assert files(tmp_path) == [".metadata", "__0_0.distcp"]
        assert problems(tmp_path) == []


@pytest.mark.parametrize("how", HOW)
def test_several_chunks_of_one_tensor(tmp_path: Path, how: str) -> None:
    whole = torch.arange(600 * 100, dtype=torch.float32).reshape(600, 100)
    boxes = {(0, 0): whole[:300, :40], (0, 40): whole[:300, 40:], (300, 0): whole[300:]}
    state = {"w": Parts.of((600, 100), boxes), "w@0,0": torch.ones(3), "one": Parts.of((2, 2), {(0, 0): whole[:2, :2]})}
    save_with(how, state, tmp_path)
    for reader in ("stock", "ours"):
        same(loaded(tmp_path, state, reader), state)
        # into one tensor, and into other boxes
        same(loaded(tmp_path, {"w": whole}, reader), {"w": whole})
        other = {"w": Parts.of((600, 100), {(0, 10): whole[:, 10:], (0, 0): whole[:, :10]})}
        same(loaded(tmp_path, other, reader), other)


@pytest.mark.parametrize("how", OURS)
def test_a_state_of_nothing_and_of_objects_alone(tmp_path: Path, how: str) -> None:
    for number, state in enumerate(({}, {"n": 3, "text": "x"}, {"none": torch.empty(0)})):
        save_with(how, state, tmp_path / str(number))
        same(loaded(tmp_path / str(number), state, "stock"), state)
        same(loaded(tmp_path / str(number), state), state)


def test_shared_memory_is_stored_once(tmp_path: Path) -> None:
    weight = torch.arange(1 << 20, dtype=torch.float32)
    save_with("ours", {"a": weight, "b": weight, "c": weight.view(1 << 20)}, tmp_path)
    assert (tmp_path / "__0_0.distcp").stat().st_size < 1.1 * weight.nbytes


def test_torch_converts_to_its_own_files_and_back(tmp_path: Path) -> None:
    state = {"w": torch.arange(50_000.0), "n": {"deep": torch.ones(3)}, "epoch": 4}
    save_with("ours", state, tmp_path / "ours")
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "whole.pt")
    same(torch.load(tmp_path / "whole.pt"), state)
    torch_save_to_dcp(tmp_path / "whole.pt", tmp_path / "back")
    same(loaded(tmp_path / "back", state), state)


def test_another_element_type_is_converted(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 300), "n": torch.arange(50)}
    save_with("ours", state, tmp_path)
    for wanted in (torch.float64, torch.bfloat16):
        into = {"w": torch.zeros(300, 300, dtype=wanted), "n": torch.zeros(50, dtype=torch.int32)}
        dcp.load(into, storage_reader=DataStatesStorageReader(tmp_path))
        same(into, {"w": state["w"].to(wanted), "n": state["n"].int()})


def test_what_torch_refuses_is_refused_alike(tmp_path: Path) -> None:
    save_with("ours", {"w": torch.ones(3, 4), "n": 3}, tmp_path)
    wrong: list[dict[str, Any]] = [{"w": torch.ones(4, 3)}, {"v": torch.ones(3)}, {"w": 5}]
    for state in wrong:
        said = []
        for reader in (dcp.FileSystemReader, DataStatesStorageReader):
            with pytest.raises(CheckpointException) as raised:
                dcp.load(copied(state), storage_reader=reader(tmp_path))
            (failure,) = raised.value.failures.values()
            said.append((type(failure[0]), str(failure[0])))
        assert said[0] == said[1]
    partial = {"w": torch.zeros(3, 4), "v": torch.ones(3)}
    dcp.load(
        partial, storage_reader=DataStatesStorageReader(tmp_path), planner=DefaultLoadPlanner(allow_partial_load=True)
    )
    same(partial, {"w": torch.ones(3, 4), "v": torch.ones(3)})


@pytest.mark.parametrize("how", ["ours", "thread", "snapshot"])
@pytest.mark.parametrize("bad", [torch.eye(3).to_sparse(), torch.ones(3, device="meta")], ids=["sparse", "meta"])
def test_what_cannot_be_stored_is_named(tmp_path: Path, how: str, bad: torch.Tensor) -> None:
    with pytest.raises((ProviderError, CheckpointException), match=r"model\.bad") as raised:
        save_with(how, {"model": {"good": torch.ones(3), "bad": bad}}, tmp_path)
    if isinstance(raised.value, CheckpointException):
        (failure,) = raised.value.failures.values()
        assert isinstance(failure[0], ProviderError)
    assert files(tmp_path) == []


def test_unknown_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="thread_count"):
        DataStatesStorageWriter(tmp_path, thread_count=2)
    with pytest.raises(SettingsError, match="block"):
        DataStatesStorageReader(tmp_path, block=5)
    with pytest.raises(TypeError, match="block"):
        ours.async_save({}, tmp_path, storage_writer=DataStatesStorageWriter(), block="2MiB")


# --- other ways to save


def test_without_collectives(tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    dcp.save(state, storage_writer=DataStatesStorageWriter(tmp_path, **SMALL), use_collectives=False)
    assert files(tmp_path) == ["__0.metadata", "__0_0.distcp"]
    same(loaded(tmp_path, state), state)
    same(loaded(tmp_path, state, "stock"), state)


def test_a_planner_that_caches_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in vars(SavePlanner) if n.startswith("_cached_")]:
        monkeypatch.setattr(SavePlanner, name, {})
    writer = DataStatesStorageWriter(**SMALL)
    for number in range(3):
        state = {"w": torch.full((5,), float(number)), "n": number}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=tmp_path / str(number), storage_writer=writer, planner=planner)
        same(loaded(tmp_path / str(number), state), state)
        same(loaded(tmp_path / str(number), state, "stock"), state)
    writer.close()


def test_what_dcp_save_returns_is_what_is_stored(tmp_path: Path) -> None:
    returned = dcp.save({"w": torch.ones(3)}, storage_writer=DataStatesStorageWriter(tmp_path, **SMALL))
    stored = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert returned.storage_data == stored.storage_data
    assert returned.version == stored.version
    assert returned.storage_meta == stored.storage_meta


def test_only_some_keys_and_in_place(tmp_path: Path) -> None:
    state = every_kind()
    save_with("ours", state, tmp_path)
    large = torch.zeros_like(state["large"])
    into = {"large": large, "model": {"bias": torch.zeros(7)}}
    dcp.load(into, storage_reader=DataStatesStorageReader(tmp_path))
    assert into["large"] is large
    same(into, {"large": state["large"], "model": {"bias": torch.ones(7)}})


# --- over an existing checkpoint


@pytest.mark.parametrize("how", OURS)
def test_overwriting_can_be_forbidden(tmp_path: Path, how: str) -> None:
    save_with(how, {"w": torch.ones(3)}, tmp_path)
    with pytest.raises((RuntimeError, CheckpointException), match="already exists"):
        save_with(how, {"w": torch.zeros(3)}, tmp_path, overwrite=False)
    same(loaded(tmp_path, {"w": torch.ones(3)}), {"w": torch.ones(3)})
    assert files(tmp_path) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize("before", ["stock", "ours"])
def test_the_old_one_is_replaced_at_once_and_gone(tmp_path: Path, how: str, before: str) -> None:
    save_with(before, {"w": torch.ones(3), "old": torch.ones(5)}, tmp_path)
    old = set(files(tmp_path))
    save_with(how, {"w": torch.zeros(3)}, tmp_path)
    same(loaded(tmp_path, {"w": torch.zeros(3)}), {"w": torch.zeros(3)})
    assert len(files(tmp_path)) == 2
    assert set(files(tmp_path)) & old == {".metadata"}


@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize("point", ["write", "store.write", "store.sync", "store.rename"])
def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, how: str, point: str) -> None:
    save_with("ours", {"w": torch.ones(3)}, tmp_path)
    if "." in point:
        faults.arm(faults.Fault(point, "fail", errno.ENOSPC))
    else:
        _native.arm_fault(point, "fail", errno.ENOSPC)
    with pytest.raises((StorageError, CheckpointException), match="No space left on device"):
        save_with(how, {"w": torch.zeros(3)}, tmp_path)
    _native.clear_faults()
    same(loaded(tmp_path, {"w": torch.ones(3)}), {"w": torch.ones(3)})
    if how == "snapshot":
        assert files(tmp_path) == [".metadata", "__0_0.distcp"]
    save_with(how, {"w": torch.full((3,), 2.0)}, tmp_path)
    same(loaded(tmp_path, {"w": torch.ones(3)}), {"w": torch.full((3,), 2.0)})


@pytest.mark.parametrize("how", OURS)
def test_a_file_that_another_save_has_made_meanwhile_is_left_alone(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with("ours", {"w": torch.ones(3)}, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(DataStatesStorageWriter, "new_file", lambda *_: tmp_path / "__0_0.distcp")
        with pytest.raises((StorageError, CheckpointException), match="File exists"):
            save_with(how, {"w": torch.zeros(3)}, tmp_path)
    same(loaded(tmp_path, {"w": torch.ones(3)}), {"w": torch.ones(3)})
    save_with(how, {"w": torch.full((3,), 2.0)}, tmp_path)
    same(loaded(tmp_path, {"w": torch.ones(3)}), {"w": torch.full((3,), 2.0)})


@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize("now", [None, b"another"])
def test_a_file_that_is_gone_is_not_made_a_checkpoint(
    tmp_path: Path, how: str, now: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old checkpoint stands: its files are deleted only after another one has become the checkpoint."""
    save_with("ours", {"w": torch.ones(3)}, tmp_path)
    results = Written.results

    def swept(self: Written, nbytes: int) -> Any:
        os.unlink(self.file.path)
        if now is not None:
            Path(self.file.path).write_bytes(now)
        return results(self, nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(Written, "results", swept)
        what = "No such file" if now is None else "__0_1.distcp was replaced: it has 7 bytes"
        with pytest.raises((StorageError, CommitError, CheckpointException), match=what):
            save_with(how, {"w": torch.zeros(3)}, tmp_path)
    same(loaded(tmp_path, {"w": torch.ones(3)}), {"w": torch.ones(3)})


@pytest.mark.parametrize("how", HOW)
def test_a_tensor_without_a_name(tmp_path: Path, how: str) -> None:
    state = {"": torch.ones(3), "w": torch.zeros(2)}
    save_with(how, state, tmp_path)
    for reader in ("stock", "ours"):
        same(loaded(tmp_path, state, reader), state)


def test_when_the_end_is_not_durable_what_stands_can_be_loaded(tmp_path: Path) -> None:
    """The directory's sync fails after the new checkpoint got its name: whichever one stands, its files exist."""
    save_with("snapshot", {"w": torch.ones(3)}, tmp_path)
    faults.arm(faults.Fault("store.sync_directory", "fail", errno.EIO, nth=2))
    with pytest.raises(StorageError):
        save_with("snapshot", {"w": torch.zeros(3)}, tmp_path)
    found = loaded(tmp_path, {"w": torch.ones(3)})["w"]
    assert found.tolist() in ([1.0] * 3, [0.0] * 3)


def test_metadata_that_is_damaged_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_with("ours", {"w": torch.ones(3)}, tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04torn")
    save_with("ours", {"w": torch.zeros(3)}, tmp_path)
    assert "cannot be read, and is replaced" in caplog.text
    same(loaded(tmp_path, {"w": torch.ones(3)}), {"w": torch.zeros(3)})


def test_metadata_that_vanishes_before_it_is_read_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_with("ours", {"w": torch.ones(3)}, tmp_path)
    read_all = LocalStore.read_all

    def read_too_late(store: LocalStore, path: Location, most: int | None = None) -> bytes:
        (tmp_path / ".metadata").unlink()
        return read_all(store, path, most)

    monkeypatch.setattr(LocalStore, "read_all", read_too_late)
    assert metadata_file.read(Location.of(tmp_path / ".metadata")) is None
    assert [record for record in caplog.records if record.name == "datastates"] == []
