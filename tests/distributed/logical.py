"""Compare what ranks describe with the logical tensors that they hold, and make checkpoints of those by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from datastates.planning import owners
from datastates.state import memory as array_memory
from datastates.state.keys import join
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import ArrayRef, Shard, object_shard


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The logical tensor as torch gathers it, for comparison."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def memory(shard: Shard) -> np.ndarray[Any, Any]:
    """A copy of the memory that a shard describes."""
    assert shard.dtype == "float32"
    assert shard.buffer is not None
    raw = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * shard.buffer.nbytes).from_address(shard.buffer.pointer))
    flat = raw[shard.buffer_offset : shard.buffer_offset + (shard.buffer.nbytes - shard.buffer_offset) // 4 * 4]
    steps = [s * 4 for s in shard.stride]
    return (
        np.lib.stride_tricks.as_strided(flat.view(np.float32), shard.shape, steps).copy()
        if flat.size
        else np.empty(shard.shape, np.float32)
    )


def described(provider: StateProvider) -> list[dict[str, Any]]:
    """For each rank, its array shards of 32-bit floats by key, with their contents."""
    own = {
        s.key: (s.global_shape, s.offset, s.flat, s.shape, s.replicas, memory(s))
        for s in provider.shards()
        if s.dtype == "float32"
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def check_tiles(provider: StateProvider, logical: dict[str, torch.Tensor]) -> dict[str, list[tuple[int, ...]]]:
    """Check that all parts agree with the logical tensors, and that the parts written cover each element once.

    One rank writes each part that several ranks hold alike. Returns for each key the replicas that each rank named.
    """
    expected = {key: whole(tensor).numpy() for key, tensor in logical.items()}
    ranks = described(provider)
    for key, tensor in expected.items():
        times = np.zeros(tensor.shape, np.int64)
        for rank, shards in enumerate(ranks):
            if key not in shards:
                continue
            global_shape, offset, flat, shape, alike, data = shards[key]
            assert global_shape == tensor.shape, key
            if flat is not None:
                assert flat == (0, 0)
                assert shape == (0,)
                continue
            assert all(o >= 0 and o + n <= g for o, n, g in zip(offset, shape, global_shape, strict=True)), key
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            np.testing.assert_array_equal(data, tensor[box], err_msg=f"{key} on rank {rank}")
            assert not alike or (rank in alike and len(alike) > 1 and list(alike) == sorted(set(alike))), (key, alike)
            for other in alike:  # a rank that is named as a replica holds the same, and names the same ranks
                assert ranks[other][key][:5] == shards[key][:5], (key, rank, other)
            writer = owners.owners([(key, data.nbytes, alike)])[0] if alike else rank
            times[box] += writer == rank
        assert (times == 1).all(), (key, times)
    return {key: [shards[key][4] if key in shards else () for shards in ranks] for key in expected}


class HandMade(Saved):
    """The description of a checkpoint of logical tensors, made by hand."""

    strict = True

    def __init__(self, value: Any) -> None:
        self.whole: dict[str, torch.Tensor] = {}
        self.reported: list[Any] = []
        self._structure = self._walk(value, "")

    def _walk(self, value: Any, key: str) -> Any:
        if isinstance(value, torch.Tensor):
            self.whole[key] = whole(value).clone()
            return self.arrays()[key]
        if isinstance(value, dict):
            return {k: self._walk(v, join(key, k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._walk(v, join(key, i)) for i, v in enumerate(value))
        return value

    def arrays(self) -> dict[str, ArrayRef]:
        return {
            k: ArrayRef(k, "torch", str(t.dtype)[6:], tuple(t.shape), tuple(t.stride())) for k, t in self.whole.items()
        }

    def every_key(self) -> Sequence[str]:
        return list(self.arrays())

    def objects(self) -> Sequence[str]:
        return [""]

    def report(self, **differences: Any) -> None:
        self.reported += [(k, v) for k, v in differences.items() if v]

    def restored_keys(self) -> Sequence[str]:
        return self.every_key()

    def structure(self, key: str) -> object:
        assert key == ""
        return self._structure


def restore(provider: StateProvider, saved: HandMade) -> list[Shard]:
    """Put the parts of logical tensors where the provider wants them, as an engine would; then restore its objects."""
    shards = [s for s in provider.destinations(saved) if not s.is_object]
    assert not saved.reported, saved.reported
    for shard in shards:
        stored = saved.whole[shard.key]
        assert shard.global_shape == tuple(stored.shape), shard
        assert shard.offset is not None
        part = stored[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))]
        array_memory.assign(shard.source, part.reshape(shard.shape).contiguous())
    into = {shard.key: shard.source for shard in shards}

    def build(value: Any) -> Any:
        if isinstance(value, ArrayRef):
            return into[value.key]
        if isinstance(value, dict):
            return {k: build(v) for k, v in value.items()}
        return type(value)(map(build, value)) if isinstance(value, (list, tuple)) else value

    provider.restore(object_shard(), build(saved.structure("")))
    return shards
