"""The live state: keys, element types, parts of logical tensors, arrays in memory. No file I/O."""

from datastates.state.arrays import array_shard
from datastates.state.dtypes import DType
from datastates.state.parts import Part
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import ArrayRef, Buffer, Shard, Shards, object_shard

__all__ = [
    "ArrayRef",
    "Buffer",
    "DType",
    "Part",
    "Saved",
    "Shard",
    "Shards",
    "StateProvider",
    "array_shard",
    "object_shard",
]
