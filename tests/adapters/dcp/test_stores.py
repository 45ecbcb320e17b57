"""Checkpoints in stores, by address: as those in directories, bit by bit."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
import torch.distributed.checkpoint as dcp
from fault_server import FaultServer
from inverted import Inverted
from memory_store import MemoryStore
from saves import Failing
from stock import archived, rewrite
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStorageReader, DataStatesStorageWriter, metadata_file
from datastates.commit.decision import Patience
from datastates.errors import CommitError, CorruptError, StorageError, UncertainError
from datastates.storage import Location, Traits, Writer, register, store_of, stores
from datastates.storage.buckets import Buckets
from states import SMALL, Parts, blank, every_kind, failure, loaded, same, save_with

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]
ROOT = "mem://bucket/ckpt"
HOW = ["ours", "thread", "snapshot"]
DATA = r"__0_[0-9a-f]{16}\.distcp"


class SmallPieces(MemoryStore):
    """It is asked for pieces of at most 64 KiB. ``fail(operation, path)`` raises what an operation fails with."""

    traits = Traits(best_piece=64 << 10)
    fail = staticmethod(lambda operation, path: None)

    def create(self, path: Location, data: bytes) -> None:
        self.fail("create", path)
        super().create(path, data)
        self.fail("created", path)

    def replace(self, path: Location, data: bytes) -> None:
        self.fail("replace", path)
        super().replace(path, data)

    def writer(self, path: Location) -> Writer:
        self.fail("writer", path)
        return super().writer(path)


@pytest.fixture
def store() -> Iterator[SmallPieces]:
    made = SmallPieces()
    register("mem", made)
    yield made
    del stores.KINDS["mem"]


def failing(operation: str, name: str, error: type[StorageError] = StorageError, number: int = errno.EACCES) -> Any:
    def fail(done: str, path: Location) -> None:
        if done == operation and path.name.endswith(name):
            raise error(number, operation, str(path))

    return staticmethod(fail)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a checkpoint in a bucket of a server, which holds nothing yet."""
    pytest.importorskip("obstore")
    pytest.importorskip("localbucket")
    (folder := tmp_path / "server").mkdir()
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("s3", Buckets(patience=1))
    with servers.server("localbucket", folder) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/ckpt"


def _raise(errors: Iterator[Exception]) -> None:
    """Raise the next one; none after the last."""
    for error in errors:
        raise error


def up(folder: Path, address: str) -> None:
    """Copy a checkpoint into a store."""
    for file in folder.iterdir():
        place = Location(address) / file.name
        store_of(place).create(place, file.read_bytes())


def down(address: str, folder: Path) -> list[str]:
    """Copy a checkpoint out of a store; returns the names of its objects."""
    folder.mkdir(parents=True)
    names = sorted(store_of(place := Location(address)).entries(place, deep=True))
    for name in names:
        (folder / name).write_bytes(store_of(place).read_all(place / name))
    return names


def names(address: str = ROOT) -> list[str]:
    return sorted(store_of(place := Location(address)).entries(place, deep=True))


@pytest.mark.parametrize("how", ["stock", "ours"])
def test_a_checkpoint_is_loaded_by_its_address(store: SmallPieces, tmp_path: Path, how: str) -> None:
    save_with(how, every_kind(), tmp_path)
    up(tmp_path, ROOT)
    same(loaded(ROOT, every_kind()), loaded(tmp_path, every_kind(), "stock"))
    into = {"large": torch.zeros(300_000, dtype=torch.int64)}
    dcp.load(into, checkpoint_id=Path(ROOT), storage_reader=(reader := DataStatesStorageReader()))
    same(into, {"large": every_kind()["large"]})
    assert (reader.checkpoint_id, reader.tally and reader.tally.unverified_nbytes) == (ROOT, 0)


@pytest.mark.parametrize("how", ["stock", "ours"])
def test_a_checkpoint_in_a_bucket_is_loaded(bucket: str, tmp_path: Path, how: str) -> None:
    save_with(how, every_kind(), tmp_path / "local")
    up(tmp_path / "local", bucket)
    same(loaded(bucket, every_kind()), every_kind())


def test_torch_reads_an_item_of_its_own_from_a_store(store: SmallPieces, tmp_path: Path, by_torch: list[str]) -> None:
    """One that is longer than a piece, behind another one."""
    value = torch.complex(torch.arange(300_000.0), torch.arange(300_000.0)).conj()
    save_with("stock", {"v": torch.ones(5), "w": torch.arange(300_000.0)}, tmp_path)
    rewrite(tmp_path, lambda _: archived(value))
    up(tmp_path, ROOT)
    state = {"v": torch.ones(5), "w": value.resolve_conj()}
    same(loaded(ROOT, state), state)
    assert by_torch == ["w"]


def test_damage_in_a_store_is_found_and_named(store: SmallPieces, tmp_path: Path) -> None:
    save_with("ours", state := {"w": torch.arange(30_000.0)}, tmp_path)
    up(tmp_path, ROOT)
    file = Location(ROOT) / "__0_0.distcp"
    data = bytearray(store.read_all(file))
    data[len(data) // 2] ^= 1
    store.replace(file, bytes(data))
    assert isinstance(found := failure(ROOT, state), CorruptError)
    assert str(file) in str(found)
    store.discard([file])
    assert isinstance(found := failure(ROOT, state), StorageError)
    assert str(file) in str(found)
    store.discard([file.parent / ".metadata"])
    with pytest.raises(FileNotFoundError, match=f"{ROOT}/.metadata"):
        DataStatesStorageReader(ROOT).read_metadata()


@pytest.mark.parametrize("how", HOW)
def test_a_checkpoint_is_saved_to_an_address(store: SmallPieces, tmp_path: Path, how: str) -> None:
    save_with(how, every_kind(), ROOT)
    save_with("stock", every_kind(), tmp_path / "stock")
    metadata, data = down(ROOT, tmp_path / "down")
    assert (metadata, bool(re.fullmatch(DATA, data))) == (".metadata", True)
    stock = loaded(tmp_path / "stock", every_kind(), "stock")
    for found in (loaded(tmp_path / "down", every_kind(), "stock"), loaded(ROOT, every_kind())):
        same(found, stock)
    # another one takes its place
    save_with(how, {"w": torch.ones(3)}, ROOT)
    same(loaded(ROOT, {"w": torch.ones(3)}), {"w": torch.ones(3)})
    assert len(names()) == 2
    assert data not in names()


@pytest.mark.long
@pytest.mark.parametrize("how", HOW)
def test_a_checkpoint_is_saved_to_a_bucket(bucket: str, tmp_path: Path, how: str) -> None:
    """Longer than a part of an upload."""
    state = {"w": torch.arange(5_000_000.0), "note": {"a": 1}}
    for number in range(2):
        save_with(how, {**state, "number": number}, bucket)
        assert len(down(bucket, tmp_path / str(number))) == 2
        for found in (loaded(tmp_path / str(number), state | {"number": 0}, "stock"), loaded(bucket, state)):
            same(found, state | {"number": number} if "number" in found else state)


@pytest.mark.parametrize("how", [*HOW, "extensions"])
def test_a_rank_without_a_part_leaves_no_object(store: SmallPieces, how: str) -> None:
    if how == "extensions":
        dcp.save({}, storage_writer=DataStatesStorageWriter(ROOT, _extensions=[Inverted()]))
    else:
        save_with(how, {}, ROOT)
    assert names() == [".metadata"]
    assert loaded(ROOT, {}) == {}


def test_another_checkpoint_is_refused_without_overwriting(store: SmallPieces) -> None:
    save_with("ours", {"w": torch.ones(3)}, ROOT)
    before = names()
    with pytest.raises(CheckpointException, match="already exists"):
        save_with("ours", {"w": torch.zeros(3)}, ROOT, overwrite=False)
    assert names() == before


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", ["data", "metadata"])
def test_a_failed_save_leaves_nothing(store: SmallPieces, how: str, what: str, there: bool) -> None:
    if there:
        save_with(how, {"w": torch.ones(3)}, ROOT)
    before = names()
    operation = "replace" if there else "create"
    store.fail = failing("writer", ".distcp") if what == "data" else failing(operation, ".metadata")
    with pytest.raises(
        (StorageError, CheckpointException), match=rf"(writer|create|replace) {ROOT}/.*Permission denied"
    ):
        save_with(how, {"w": torch.zeros(300_000)}, ROOT)
    assert names() == before
    store.fail = failing("", "")
    if there:
        same(loaded(ROOT, {"w": torch.ones(3)}), {"w": torch.ones(3)})
    save_with(how, {"w": torch.zeros(3)}, ROOT)
    same(loaded(ROOT, {"w": torch.ones(3)}), {"w": torch.zeros(3)})


@pytest.mark.parametrize("how", HOW)
def test_a_lost_answer_is_looked_for(store: SmallPieces, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.fail = failing("created", ".metadata", UncertainError, 0)  # it is made
    save_with(how, {"w": torch.ones(3)}, ROOT)
    same(loaded(ROOT, {"w": torch.ones(3)}), {"w": torch.ones(3)})
    store.discard([Location(ROOT) / name for name in names()])
    busy = iter([UncertainError(0, "create", f"{ROOT}/.metadata")])
    monkeypatch.setattr(store, "fail", lambda operation, path: _raise(busy) if path.name == ".metadata" else None)
    save_with(how, {"w": torch.ones(3)}, ROOT)  # the store is asked again
    store.discard([Location(ROOT) / name for name in names()])
    monkeypatch.setattr(metadata_file, "PATIENCE", Patience(fence=0))
    store.fail = failing("create", ".metadata", UncertainError, 0)  # it may be made later, and then needs the data
    with pytest.raises((StorageError, CheckpointException), match=rf"create {ROOT}/.metadata"):
        save_with(how, {"w": torch.ones(3)}, ROOT)
    assert [bool(re.fullmatch(DATA, name)) for name in names()] == [True]


def test_a_bucket_may_lose_an_answer(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(2_500_000.0), "n": 5}  # of two parts
    with FaultServer(dict(os.environ)) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.environment["AWS_ENDPOINT_URL"])
        lost = (("lose", "PUT", ".metadata"), ("answer", "PUT", ".metadata"), ("lose", "POST", "uploadId="))
        for how, fault in zip(HOW, lost, strict=True):
            spoiled = faults.add(*fault)
            save_with(how, state, bucket)
            assert spoiled.met.is_set()
            same(loaded(bucket, state), state)
            assert len(names(bucket)) == 2


def test_extensions_write_to_a_store(store: SmallPieces, tmp_path: Path) -> None:
    state = {"w": torch.arange(500_000.0), "n": 5}
    dcp.save(state, storage_writer=(writer := DataStatesStorageWriter(ROOT, _extensions=[Inverted()])))
    down(ROOT, tmp_path / "down")
    registry = ExtensionRegistry()
    registry.register(Inverted)
    for reader in (dcp.FileSystemReader(tmp_path / "down", registry), DataStatesStorageReader(ROOT, registry)):
        dcp.load(into := blank(state), storage_reader=reader)
        same(into, state)
    before, store.fail = names(), failing("create", ".distcp")
    with pytest.raises(CheckpointException, match=f"create {ROOT}/__0_"):
        dcp.save(state, storage_writer=writer)
    assert names() == before
    writer.close()


@pytest.mark.parametrize("where", ["", "finish", "data"])
def test_ranks_save_one_checkpoint_or_none(
    store: SmallPieces, together: Callable[..., list[Any]], where: str, tmp_path: Path
) -> None:
    whole = torch.arange(80_000.0).reshape(80, 1000)
    writers = [DataStatesStorageWriter(rank_timeout=10, **SMALL) for _ in range(2)]

    def save(rank: int) -> None:
        state = {"w": Parts.of((80, 1000), {(40 * rank, 0): whole[40 * rank : 40 * rank + 40]})}
        planner = Failing(where) if rank else None
        ours.async_save(state, ROOT, storage_writer=writers[rank], planner=planner).wait_committed()

    errors = together(2, save)
    together(2, lambda rank: writers[rank].close())
    if where:
        assert [type(error) for error in errors] == [CommitError, ValueError]
        assert names() == []
    else:
        assert errors == [None, None]
        assert [name[:4] for name in down(ROOT, tmp_path / "down")] == [".met", "__0_", "__1_"]
        same(loaded(tmp_path / "down", {"w": whole}, "stock"), {"w": whole})


@pytest.mark.long
def test_two_ranks_save_to_a_bucket(bucket: str, train: Any, tmp_path: Path) -> None:
    """In each way, as torch's own writer saves to a folder; another number of ranks loads it."""
    script = """
        net, optimizer = make()
        steps(net, optimizer, 0, 2)
        expected = whole(state(net, optimizer))
        for how in ("ours", "thread", "snapshot"):
            save(how, sys.argv[1], net, optimizer)
            steps(net, optimizer, 2, 3)  # it is loaded back
            load("ours", sys.argv[1], net, optimizer)
            same(whole(state(net, optimizer)), expected)
        save("stock", sys.argv[2], net, optimizer)
    """
    train(2, script, bucket, tmp_path / "stock")
    assert len(down(bucket, tmp_path / "down")) == 3
    state = torch.load(_one_file(tmp_path / "stock"), weights_only=False)
    for found in (loaded(tmp_path / "down", state, "stock"), loaded(bucket, state)):
        same(found, state)


def _one_file(folder: Path) -> Path:
    """A checkpoint as one file for ``torch.load``, by torch."""
    dcp_to_torch_save(folder, folder.with_suffix(".pt"))
    return folder.with_suffix(".pt")
