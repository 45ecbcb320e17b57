"""Describing arrays that are new at every snapshot, as JAX's are: only their addresses change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates.state import dtypes, jax_arrays
from datastates.state.shards import HOST, Shard, Shards

_NOTHING = np.empty(0)
"""Stands for the memory of an array that has no elements in this process."""


@dataclass(frozen=True, slots=True, eq=False)
class Renewed:
    """A description of one snapshot's arrays in host memory, for the next snapshot. It keeps no memory alive.

    Attributes:
        kinds: The class of each array.
        forms: Shape, element type and sharding of each array; None as the sharding of a NumPy array.
        numbers: For each array, which of its addressable shards are its boxes; None for an array in one piece.
        counts: The number of shards that describe each array.
        strides: The strides of each shard's memory, in bytes.
        layout: The shards, without arrays.
    """

    kinds: list[type]
    forms: list[tuple[Any, ...]]
    numbers: list[list[int] | None]
    counts: list[int]
    strides: list[tuple[int, ...]]
    layout: tuple[Shard, ...]

    @classmethod
    def of(cls, values: Sequence[Any], shards: Sequence[Shard]) -> Renewed | None:
        """Remember the shards by which :func:`datastates.state.arrays.shards_of` described the values.

        Returns:
            The description, or None if it could not be used again: an array is neither of JAX nor of NumPy, or lies in
            device memory, or a shard has gaps or shares its buffer with others.
        """
        if not all(type(value) is np.ndarray or jax_arrays.is_array(value) for value in values):
            return None
        if any(shard.buffer is None or shard.buffer.device != HOST for shard in shards):
            return None  # before NumPy is asked for the memory: it would copy all of it to the host
        numbers = [_numbers(value) for value in values]
        counts = [1 if boxes is None else max(len(boxes), 1) for boxes in numbers]
        strides = []
        for shard, held in zip(shards, _memory(values, numbers), strict=True):
            if not _is_its_own(shard, held):
                return None
            strides.append(held.strides)
        layout = (replace(s, source=None, buffer=s.buffer and replace(s.buffer, owner=None)) for s in shards)
        kinds, forms = list(map(type, values)), list(map(_form, values))
        return cls(kinds, forms, numbers, counts, strides, tuple(layout))

    def again(self, values: Sequence[Any]) -> Shards | None:
        """Describe the next snapshot's arrays as shards, once they are computed; None if their form has changed."""
        if list(map(type, values)) != self.kinds or list(map(_form, values)) != self.forms:
            return None
        if any(jax_arrays.is_gone(value) for value in values if type(value) is not np.ndarray):
            return None
        memory = _memory(values, self.numbers)
        if [held.strides for held in memory] != self.strides:
            return None
        addresses = np.array([held.ctypes.data for held in memory], np.uint64)
        sources = [value for value, count in zip(values, self.counts, strict=True) for _ in range(count)]
        return Shards(
            self.layout, sources, versions=np.full(len(memory), -1, np.int64), memory=memory, addresses=addresses
        )


def _form(value: Any) -> tuple[Any, ...]:
    return value.shape, value.dtype, None if type(value) is np.ndarray else value.sharding


def _numbers(value: Any) -> list[int] | None:
    if type(value) is np.ndarray or len(value.sharding.device_set) == 1:
        return None
    return [] if 0 in value.shape else jax_arrays.boxes(value)


def _memory(values: Sequence[Any], numbers: Sequence[list[int] | None]) -> list[np.ndarray[Any, Any]]:
    """View the memory of each shard by NumPy. XLA does not reuse the memory while a view is held."""
    found: list[np.ndarray[Any, Any]] = []
    for value, boxes in zip(values, numbers, strict=True):
        if boxes is None:
            found.append(np.asarray(value))
        elif boxes:
            shards = value.addressable_shards
            found += [np.asarray(shards[number].data) for number in boxes]
        else:
            found.append(_NOTHING)
    return found


def _is_its_own(shard: Shard, held: np.ndarray[Any, Any]) -> bool:
    """Whether a shard's buffer is exactly the memory of its array."""
    buffer, dtype = shard.buffer, dtypes.BY_NAME.get(shard.dtype or "")
    if buffer is None or dtype is None or buffer.nbytes != shard.nbytes:
        return False
    return not buffer.nbytes or held.strides == tuple(step * dtype.itemsize for step in shard.stride)
