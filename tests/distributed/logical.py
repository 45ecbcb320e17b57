"""Compare what ranks describe with the logical tensors that they hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from datastates.planning import write
from datastates.state.provider import StateProvider
from datastates.state.shards import Shard

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from in_memory import Checkpoint, elements, whole


def described(provider: StateProvider) -> list[dict[str, Any]]:
    """For each rank, its array shards of 32-bit floats by key, with their contents."""
    own = {
        s.key: (s.global_shape, s.offset, s.flat, s.shape, s.replicas, elements(s).numpy())
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
            writer = write.owners([(key, data.nbytes, alike)])[0] if alike else rank
            times[box] += writer == rank
        assert (times == 1).all(), (key, times)
    return {key: [shards[key][4] if key in shards else () for shards in ranks] for key in expected}


def restore(provider: StateProvider, saved: Checkpoint) -> list[Shard]:
    """Restore a provider from logical tensors, which it must fit; returns the arrays that were read."""
    found = saved.restore(provider)
    assert not found.differences, found.differences
    return found.read
