"""The names that the author of a state provider needs: :class:`StateProvider`, :class:`Shard`, :class:`Buffer`."""

from datastates.state.provider import Encoder, Saved, StateProvider, walk_unique
from datastates.state.shards import (
    HOST,
    ArrayLeaf,
    ArrayRef,
    Buffer,
    Shard,
    Shards,
    StoredArray,
    full_key,
    object_shard,
)
from datastates.state.strides import is_dense, span

__all__ = [
    "HOST",
    "ArrayLeaf",
    "ArrayRef",
    "Buffer",
    "Encoder",
    "Saved",
    "Shard",
    "Shards",
    "StateProvider",
    "StoredArray",
    "full_key",
    "is_dense",
    "object_shard",
    "span",
    "walk_unique",
]
