"""Columns of matrices on GPUs: rows of any length, by one rank alone and by several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates as ds
from datastates.providers import from_state_dict
from datastates.state.arrays import array_shard
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Shard

WHOLE = 3000
"""Bytes of a row of the stored matrices."""


class Columns(StateProvider):
    """The columns of one matrix from ``begin`` on."""

    def __init__(self, tensor: torch.Tensor, begin: int) -> None:
        super().__init__("s")
        self._shard = array_shard("w", tensor, global_shape=(tensor.shape[0], WHOLE), offset=(0, begin))

    def shards(self) -> Sequence[Shard]:
        return [self._shard]

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        return self.shards()

    def serialize(self, shard: Shard) -> bytes:
        raise AssertionError

    def restore(self, shard: Shard, value: object) -> None:
        raise AssertionError


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(("begin", "width"), [(0, 1500), (1, 256), (1500, 1499), (2, 200), (0, 2999), (17, 2)])
def test_columns_are_restored_onto_a_gpu(tmp_path: Path, begin: int, width: int, spaced: bool) -> None:
    matrix = torch.randint(256, (4001, WHOLE), dtype=torch.uint8)
    ds.snapshot([from_state_dict("s", {"w": matrix})], tmp_path / "c").wait_committed()
    room = torch.zeros(4001, width + 5 * spaced, dtype=torch.uint8, device="cuda")
    done = ds.restore([Columns(room[:, :width], begin)], tmp_path / "c", strict=False)
    assert torch.equal(room[:, :width].cpu(), matrix[:, begin : begin + width])
    assert not room[:, width:].any()
    assert done.needed_nbytes == 4001 * width


COLUMNS = """
import os, sys
from pathlib import Path
import torch
import datastates as ds
from datastates.state.arrays import array_shard
from datastates.state.provider import StateProvider

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK % torch.cuda.device_count())
torch.cuda.set_device(DEVICE)
SHAPES = {"w": (4000, 3000), "v": (3001, 2000), "wide": (60, 300_000)}

class Part(StateProvider):
    def __init__(self, dim):
        super().__init__("s")
        self.tensors, self._shards = {}, []
        for key, shape in SHAPES.items():
            begin, end = (shape[dim] * (RANK + i) // RANKS for i in (0, 1))
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + len(key)
            self.tensors[key] = whole.narrow(dim, begin, end - begin).contiguous().to(DEVICE)
            offset = [0, 0]
            offset[dim] = begin
            self._shards.append(array_shard(key, self.tensors[key], global_shape=shape, offset=offset))
    def shards(self):
        return self._shards
    def destinations(self, saved):
        return self._shards
    def serialize(self, shard):
        raise AssertionError
    restore = serialize

with ds.Checkpointer(Path(sys.argv[1]), rank=RANK, world_size=RANKS, host_cache="128MiB") as checkpointer:
    checkpointer.snapshot([Part(0)], step=1).wait_committed()
    state = Part(1)
    wanted = {key: tensor.clone() for key, tensor in state.tensors.items()}
    for tensor in state.tensors.values():
        tensor.zero_()
    done = checkpointer.restore([state])
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in state.tensors.items())
    assert done.needed_nbytes == sum(t.nbytes for t in wanted.values())
"""


def test_ranks_restore_columns_onto_gpus(ranks: Any, tmp_path: Path) -> None:
    ranks(3, COLUMNS, tmp_path / "c", timeout=150)
