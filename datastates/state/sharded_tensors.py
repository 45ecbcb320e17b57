"""torch's ShardedTensors, as torchrec makes them: the boxes of a logical tensor that this rank holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from datastates._base.loaded import loaded
from datastates.state import arrays
from datastates.state.shards import Shard


@functools.cache
def _is_class(cls: Any) -> bool:
    return any(c.__name__ == "ShardedTensor" and c.__module__.startswith("torch.distributed") for c in cls.__mro__)


def is_sharded(value: object) -> bool:
    """Whether a value is one of torch's ShardedTensors."""
    cls: Any = type(value)
    return _is_class(cls)


def shards_of(key: str, tensor: Any, is_lazy: Callable[[Any], bool]) -> list[Shard]:
    """Describe this rank's boxes of a ShardedTensor as shards to save; a rank without a box saves an empty part.

    Args:
        key: The key of the logical tensor.
        tensor: The ShardedTensor.
        is_lazy: Tells whether the tensor of a box stays unchanged until the snapshot is captured.

    Raises:
        TypeError: The tensor of a box is no plain memory.
    """
    shape = tuple(tensor.metadata().size)
    found = [
        arrays.array_shard(
            key, one.tensor, lazy=is_lazy(one.tensor), global_shape=shape, offset=one.metadata.shard_offsets
        )
        for one in tensor.local_shards()
    ]
    if found:
        return found
    empty = loaded("torch").empty(0, dtype=tensor.metadata().tensor_properties.dtype)
    return [arrays.array_shard(key, empty, lazy=False, global_shape=shape, flat=(0, 0))]


def destinations(key: str, tensor: Any) -> list[Shard]:
    """Describe this rank's boxes of a ShardedTensor as shards to restore into."""
    shape = tuple(tensor.metadata().size)
    return [
        replace(
            arrays.destination(key, one.tensor), global_shape=shape, offset=tuple(one.metadata.shard_offsets), flat=None
        )
        for one in tensor.local_shards()
    ]
