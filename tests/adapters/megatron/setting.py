"""What the tests save and load with Megatron-Core, in several layouts of ranks. Each script imports all of this."""
# ruff: noqa: F401

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from datastates import _native as native
from datastates._base import faults
from datastates.adapters.megatron import DataStatesLoadStrategy, DataStatesSaveStrategy, install
from datastates.errors import CommitError, CorruptError, StorageError, TornSnapshotError

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from hold import GATE, held
from in_ranks import PATIENCE, arm, end, fault, rank, say, together, wait_for

# Megatron's save calls these even without a GPU; they are set here, as a worker that it spawns imports this, too
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None
torch.cuda.set_device = lambda *_: None
torch.cuda.device_count = lambda: 1
torch.cuda.is_available = lambda: False  # which may ask device_count()

LAYERS, WIDTH = 4, 64


def begin() -> None:
    """Join the other ranks."""
    dist.init_process_group("gloo")


# --- a state, as each rank of a layout holds it


def whole(key: str, shape: tuple[int, ...], step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A logical tensor at a step. It is the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * zlib.crc32(key.encode()) + step)
    return torch.randn(shape, generator=generator).to(dtype)


@dataclass(frozen=True)
class Layout:
    """Which part of the model this rank holds."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def place(self) -> tuple[int, int, int]:
        """This rank's index along the tensor, pipeline and data axes."""
        assert self.tp * self.pp * self.dp == dist.get_world_size()
        return rank() % self.tp, rank() // self.tp % self.pp, rank() // (self.tp * self.pp)

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor that is tensor-parallel along a dimension."""
        return tensor.chunk(self.tp, dim)[self.place[0]]

    def layers(self) -> range:
        """The layers of this rank's pipeline stage."""
        each = LAYERS // self.pp
        return range(each * self.place[1], each * (self.place[1] + 1))


def _glu(key: str, data: torch.Tensor, at: Layout) -> ShardedTensorFactory:
    # two matrices in one parameter, as in Megatron's gated units: each is sharded by itself

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> list[ShardedTensor]:
        first, second = (key + "_w", data.chunk(2)[0]), (key + "_v", data.chunk(2)[1])
        offset = (0, at.place[0], at.tp)
        return [ShardedTensor.from_rank_offsets(k, d, offset, replica_id=replica_id) for k, d in (first, second)]

    return ShardedTensorFactory(key, data, build, lambda parts: torch.cat(parts), at.place[2])


def state(at: Layout, step: int | None = None, *, own: bool = False) -> dict[str, Any]:
    """This rank's sharded state at a step, or one to load into (None). ``own`` adds objects of this layout only."""
    tp, pp, dp = at.place

    def tensor(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype) if step is None else whole(key, shape, step, dtype)

    def glu() -> torch.Tensor:
        halves = (at.part(tensor(f"glu_{which}", WIDTH, 8), 0) for which in "wv")
        return torch.cat(list(halves))

    number = -1 if step is None else step
    last = pp == at.pp - 1
    cut = 3 * (tp > 0), 3 if tp == 0 and at.tp > 1 else 10 - 3 * (tp > 0)  # an uneven split of ten rows
    made: dict[str, Any] = {
        "layers": {
            # keys are integers, as in optimizers
            layer: ShardedTensor.from_rank_offsets(
                "decoder.weight",
                at.part(tensor(f"decoder.{layer}", WIDTH, WIDTH), 0),
                (0, layer, LAYERS),
                (1, tp, at.tp),
                replica_id=dp,
                prepend_axis_num=1,
            )
            for layer in at.layers()
        },
        "norm": ShardedTensor.from_rank_offsets(
            "norm", tensor("norm", WIDTH, dtype=torch.bfloat16), replica_id=(tp, pp, dp)
        ),
        "groups": ShardedObject("groups", {"seed": [number], "lr": 0.5}, (1,), (0,), replica_id=at.place),
        "local": LocalNonpersistentObject(f"rank {rank()}"),
        "iteration": number,
        "args": {"lr": 0.5, "betas": [0.9, 0.95]},
        "moments": [
            ShardedTensor.from_rank_offsets(
                "exp_avg", at.part(tensor("exp_avg", WIDTH, WIDTH), 1), (1, tp, at.tp), replica_id=(pp, dp)
            ),
            ShardedTensor(
                "uneven",
                tensor("uneven", 10, 7)[cut[0] : cut[0] + cut[1]],
                torch.float32,
                (cut[1], 7),
                (10, 7),
                (cut[0], 0),
                None,
                replica_id=(pp, dp),
            ),
        ],
    }
    if last:
        made["glu"] = _glu("glu", glu(), at)
        made["scalar"] = ShardedTensor.from_rank_offsets("scalar", tensor("scalar"), replica_id=(tp, dp))
    if own:
        made["rng"] = ShardedObject("rng", {"seed": [number, tp, pp]}, (at.tp, at.pp), (tp, pp), replica_id=dp)
    return made


def plain(value: Any) -> Any:
    """What loading a state must give: the data of sharded values, and all else as it is."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else getattr(value, "data", value)


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two loaded states differ."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [f"{at}: {one!r} | {other!r}"]
    if isinstance(one, dict) and isinstance(other, dict):
        found = [] if list(map(repr, sorted(one, key=str))) == list(map(repr, sorted(other, key=str))) else [at]
        return found + [d for key in one if key in other for d in differences(one[key], other[key], f"{at}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [d for n, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{at}/{n}")]
    return [] if type(one) is type(other) and one == other else [f"{at}: {one!r} | {other!r}"]


# --- saving and loading


def save(state: Any, directory: Path, strategy: Any, **options: Any) -> Any:
    """Call ``dist_checkpointing.save`` of any version; an asynchronous save returns the request."""
    together(lambda: directory.mkdir(parents=True, exist_ok=True))
    known = inspect.signature(dist_checkpointing.save).parameters
    if "async_strategy" in known:
        options["async_strategy"] = "mcore"
    return dist_checkpointing.save(state, str(directory), strategy, **options)


def load(state: Any, directory: Path, strategy: Any = None, **options: Any) -> Any:
    """``dist_checkpointing.load``."""
    return dist_checkpointing.load(state, str(directory), strategy, **options)


def loaded_as(at: Layout, step: int, directory: Path, strategy: Any, *, own: bool = False) -> None:
    """Load with a strategy in a layout, and compare with the state of the step."""
    found = load(state(at, own=own), directory, strategy)
    wrong = differences(plain(state(at, step, own=own)), found)
    assert not wrong, wrong


def finished(directory: Path) -> bool:
    """Whether a directory is a checkpoint to Megatron."""
    return (directory / "metadata.json").exists()


def names(directory: Path) -> list[str]:
    """The files of a checkpoint."""
    return sorted(path.name for path in directory.iterdir())


def files_of_ranks(directory: Path) -> list[str]:
    """The files with tensors and objects."""
    return [name for name in names(directory) if name.endswith(".distcp")]


class Stock:
    """Megatron's own strategies."""

    @staticmethod
    def save() -> Any:
        """The save strategy, in any version of Megatron."""
        return TorchDistSaveShardedStrategy("torch_dist", 1)

    load = TorchDistLoadShardedStrategy


class Ours:
    """This package's strategies."""

    save = DataStatesSaveStrategy
    load = DataStatesLoadStrategy
