"""Checkpoints in stores, by address: as those in directories, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import servers
import torch
import torch.distributed.checkpoint as dcp
from memory_store import MemoryStore
from stock import archived, rewrite

from datastates.adapters.dcp import DataStatesStorageReader
from datastates.errors import CorruptError, StorageError
from datastates.storage import Location, Traits, register, store_of, stores
from datastates.storage.buckets import Buckets
from states import every_kind, failure, loaded, same, save_with

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
ROOT = "mem://bucket/ckpt"


class SmallPieces(MemoryStore):
    traits = Traits(best_piece=64 << 10)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = SmallPieces()
    register("mem", made)
    yield made
    del stores.KINDS["mem"]


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


def up(folder: Path, address: str) -> None:
    """Copy a checkpoint into a store."""
    for file in folder.iterdir():
        place = Location(address) / file.name
        store_of(place).create(place, file.read_bytes())


@pytest.mark.parametrize("how", ["stock", "ours"])
def test_a_checkpoint_is_loaded_by_its_address(store: MemoryStore, tmp_path: Path, how: str) -> None:
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


def test_torch_reads_an_item_of_its_own_from_a_store(store: MemoryStore, tmp_path: Path, by_torch: list[str]) -> None:
    """One that is longer than a piece, behind another one."""
    value = torch.complex(torch.arange(300_000.0), torch.arange(300_000.0)).conj()
    save_with("stock", {"v": torch.ones(5), "w": torch.arange(300_000.0)}, tmp_path)
    rewrite(tmp_path, lambda _: archived(value))
    up(tmp_path, ROOT)
    state = {"v": torch.ones(5), "w": value.resolve_conj()}
    same(loaded(ROOT, state), state)
    assert by_torch == ["w"]


def test_damage_in_a_store_is_found_and_named(store: MemoryStore, tmp_path: Path) -> None:
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
