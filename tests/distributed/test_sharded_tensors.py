"""torch's ShardedTensors, as torchrec makes them, are parts of logical tensors, and restore in place as with DCP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

import datastates as ds
from datastates.providers import from_state_dict, from_stateful

warnings.filterwarnings("ignore", category=FutureWarning)
folder, word = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
ROWS = 13


class Module(nn.Module):
    # as torchrec's DistributedModelParallel: its state has ShardedTensors of its own memory
    def __init__(self, seed):
        super().__init__()
        self.tables = make(seed)

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), **self.tables}

    def load_state_dict(self, state, strict=True):
        for name, table in self.tables.items():
            for mine, theirs in zip(table.local_shards(), state[name].local_shards(), strict=True):
                mine.tensor.copy_(theirs.tensor)
        return super().load_state_dict({k: v for k, v in state.items() if k not in self.tables}, strict=strict)


class Object:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def table(seed, cuts):
    # boxes of rows, dealt out to the ranks in turn
    whole = torch.arange(ROWS * 3.0).reshape(ROWS, 3) + seed
    bounds = [0, *cuts, ROWS]
    boxes = [
        Shard.from_tensor_and_offsets(whole[a:b].clone() if seed else torch.zeros(b - a, 3), [a, 0], rank)
        for i, (a, b) in enumerate(zip(bounds, bounds[1:]))
        if i % count == rank
    ]
    return init_from_local_shards(boxes, [ROWS, 3])


def make(seed):
    cuts = [2, 5, 9] if word == "save" else [7]
    return {"one": table(seed, cuts), "two": table(seed and seed + 100, [] if word == "save" else [4])}


def numbers(value):
    if hasattr(value, "local_shards"):
        return [(tuple(s.metadata.shard_offsets), s.tensor.tolist()) for s in value.local_shards()]
    if isinstance(value, dict):
        return {k: numbers(v) for k, v in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def given(seed):
    return {"tables": make(seed), "step": seed}, Module(seed), Object({"tables": make(seed), "n": seed})


def providers(state, module, obj):
    return [from_state_dict("s", state), from_stateful("m", module), from_stateful("o", obj)]


if word == "save":
    source = given(5)
    dcp.save({"tables": make(5)}, checkpoint_id=folder / "stock")
    ds.snapshot(providers(*source), folder / "ours").wait_committed()
    assert torch.load(folder / "ours" / f"rank-{rank:05}.pt", weights_only=True)["s"]["step"] == 5
    if rank == 0:
        loaded = ds.load(folder / "ours")["s"]["tables"]
        assert torch.equal(loaded["one"], torch.arange(ROWS * 3.0).reshape(ROWS, 3) + 5)
live = given(0)
tables, stock = live[0]["tables"], {"tables": make(0)}
dcp.load(stock, checkpoint_id=folder / "stock")
ds.restore(providers(*live), folder / "ours")
assert live[0]["tables"] is tables
assert live[0]["step"] == live[2].state["n"] == 5
assert numbers(live[0]["tables"]) == numbers(stock["tables"])
assert numbers(live[1].tables) == numbers(stock["tables"])
assert numbers(live[2].state["tables"]) == numbers(stock["tables"])
dist.destroy_process_group()
"""


@pytest.mark.by_hand
def test_any_number_of_ranks_takes_the_rows_that_it_holds(ranks: Callable[..., object], tmp_path: Path) -> None:
    ranks(2, SCRIPT, tmp_path, "save", timeout=100)
    ranks(1, SCRIPT, tmp_path, "take", timeout=100)
    ranks(3, SCRIPT, tmp_path, "take", timeout=100)
