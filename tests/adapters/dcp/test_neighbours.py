"""Ranks of one host that load columns of the same matrices divide the reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from datastates.adapters.dcp.load.neighbours import Offer, introduce

LOADING = """
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from datastates.adapters.dcp.load import reader as reading
from datastates.ranks.neighbours import Listener

root, rank = Path(sys.argv[1]), dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
whole = {f"w{i}": torch.arange(1 << 22, dtype=torch.float32).reshape(4096, 1024) + i for i in range(2)}

def sharded(state, dim):
    parts = {key: value.chunk(2, dim)[rank].contiguous() for key, value in state.items()}
    return {key: DTensor.from_local(part, mesh, (Shard(dim),)) for key, part in parts.items()}

def load(planner=None):
    into = sharded({key: torch.zeros_like(value) for key, value in whole.items()}, 1)
    reader = DataStatesStorageReader(root)
    dcp.load(into, storage_reader=reader, planner=planner)
    expected = sharded(whole, 1)
    assert all(torch.equal(part.to_local(), expected[key].to_local()) for key, part in into.items())
    return reader.tally

def save(writer):
    dcp.save(sharded(whole, 0), checkpoint_id=root, storage_writer=writer)
"""


def loading(train: Any, script: str, root: Path) -> None:
    train(2, "from torch.distributed.tensor import Shard\n" + LOADING + script, root)


def test_each_row_is_read_once_for_both_ranks(train: Any, tmp_path: Path) -> None:
    loading(
        train,
        """
save(DataStatesStorageWriter())
reading._WITHIN = 30  # on a busy machine ranks may come late
for _ in range(2):
    tally = load()
    assert tally.needed_nbytes == 1 << 24
    assert 0.9 * (1 << 23) < tally.received_nbytes < 1.1 * (1 << 23), tally
    assert tally.read_nbytes < 1.1 * (1 << 24), tally
    assert tally.unverified_nbytes == 0
""",
        tmp_path / "saved",
    )


@pytest.mark.long
def test_a_rank_that_cannot_take_part_leaves_the_others_to_read_alone(train: Any, tmp_path: Path) -> None:
    loading(
        train,
        """
save(DataStatesStorageWriter())
asked, connect = [], Listener.connect

def tried(listener, ranks, within):
    asked.append(ranks)
    if rank == 0:
        raise OSError("no connection")
    return connect(listener, ranks, 0.2)

Listener.connect = tried
tally = load()
assert asked == [[1 - rank]]
assert tally.received_nbytes == 0 and tally.needed_nbytes == 1 << 24
""",
        tmp_path / "saved",
    )


@pytest.mark.long
def test_a_rank_that_fails_before_it_meets_the_others_fails_the_load(train: Any, tmp_path: Path) -> None:
    loading(
        train,
        """
save(DataStatesStorageWriter())
reading._WITHIN = 0.2

class Failing(DefaultLoadPlanner):
    def resolve_tensor(self, item):
        if rank == 1:
            raise RuntimeError("no such tensor here")
        return super().resolve_tensor(item)

try:
    load(Failing())
except dcp.api.CheckpointException as error:
    assert "no such tensor here" in str(error)
    assert list(error.failures) == [1]
else:
    raise AssertionError("the load did not fail")
reading._WITHIN = 30  # on a busy machine ranks may come late
assert load().received_nbytes > 0
""",
        tmp_path / "saved",
    )


def test_torchs_files_are_read_alone(train: Any, tmp_path: Path) -> None:
    loading(
        train,
        """
save(dcp.FileSystemWriter(root))
made, introduce = [], reading.introduce
reading.introduce = lambda offers: made.append(offers) or introduce(offers)
tally = load()
assert tally.received_nbytes == 0
assert made == ([{}] if rank == 0 else [])
""",
        tmp_path / "saved",
    )


def metadata() -> Metadata:
    """A matrix of 4096 × 2048 in two parts of 2048 rows, the matrices of two layers, a vector and an object."""
    properties = TensorProperties(dtype=torch.float32)
    halves = [ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((2048, 2048))) for row in (0, 2048)]
    layers = [ChunkStorageMetadata(torch.Size((layer, 0, 0)), torch.Size((1, 2048, 2048))) for layer in range(2)]
    whole = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((1 << 24,)))]
    return Metadata(
        {
            "w": TensorStorageMetadata(properties, torch.Size((4096, 2048)), halves),
            "layers": TensorStorageMetadata(properties, torch.Size((2, 2048, 2048)), layers),
            "v": TensorStorageMetadata(properties, torch.Size((1 << 24,)), whole),
            "o": BytesStorageMetadata(),
        }
    )


def item(name: str, lengths: tuple[int, ...], begin: tuple[int, ...] = (0, 0), hint: int | None = 0) -> ReadItem:
    stored = MetadataIndex(name, torch.Size(begin), hint)
    none = torch.Size([0] * len(lengths))
    return ReadItem(LoadItemType.TENSOR, stored, none, stored, none, torch.Size(lengths))


@pytest.mark.parametrize("hint", [0, 1, 7, None])
def test_columns_of_eight_mebibytes_are_offered(hint: int | None) -> None:
    def offer(*items: ReadItem) -> bool:
        nowhere: Any = None  # where an item is stored does not matter
        return Offer.of([(one, nowhere) for one in items], metadata()) is not None

    assert offer(item("w", (2048, 512), hint=hint), item("w", (2048, 512), (2048, 0), hint))
    assert not offer(item("w", (2048, 512), hint=hint))
    assert not offer(item("w", (1024, 2048), hint=hint), item("w", (1024, 2048), (2048, 0), hint))
    assert not offer(item("v", (1 << 23,), (0,), hint))
    one, other = (0, 0, 0), (1, 0, 0)
    assert offer(item("layers", (1, 2048, 512), one, hint), item("layers", (1, 2048, 512), other, hint))
    assert not offer(item("layers", (1, 1024, 2048), one, hint), item("layers", (1, 1024, 2048), other, hint))


def test_the_ranks_of_each_host_are_introduced() -> None:
    hosts = {0: "a", 2: "b", 3: "a", 4: "c", 5: "a", 6: "b"}
    found = introduce({rank: Offer(host) for rank, host in hosts.items()})
    three, two = (0, 3, 5), (2, 6)
    assert {rank: one.ranks for rank, one in found.items()} == {0: three, 3: three, 5: three, 2: two, 6: two}
    assert all(one.rank == rank for rank, one in found.items())
    (name,) = {one.name for one in found.values()}
    assert introduce({0: Offer("a"), 1: Offer("a")})[0].name != name
