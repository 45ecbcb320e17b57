"""Queues reads of parts of tensors from many files in columns of numbers, without an object for each stored row.

It serves parts that are contiguous stretches of their flattened tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datastates._base.columns import I32, I64, U64, Bools
from datastates.container.stretches import Stretches
from datastates.container.table import Row
from datastates.reading.read_queue import Ranges
from datastates.reading.reads import Reads
from datastates.reading.tensors import Found, FoundRow
from datastates.state import arrays, parts
from datastates.state.dtypes import BY_NAME
from datastates.state.shards import Shard
from datastates.state.strides import is_row_major


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """Live parts of tensors, one column entry for each.

    Attributes:
        fits: Whether the part is one stretch of the flattened logical tensor, and contiguous in memory. For other parts
            the other columns have no meaning, except ``key``.
        begin, numel: First element and number of elements of the stretch, in the flattened logical tensor.
        whole: Whether the part is the whole tensor, in the tensor's shape.
        itemsize: Bytes of an element.
        pointer, device, stream: As in :class:`~datastates.state.shards.Buffer`.
        key: Full key of the tensor.
    """

    fits: Bools
    begin: I64
    numel: I64
    whole: Bools
    itemsize: I64
    pointer: U64
    device: I32
    stream: U64
    key: np.ndarray[tuple[int], np.dtype[np.object_]]

    @classmethod
    def of(cls, wanted: Sequence[tuple[Row, Shard]]) -> _Live:
        """Describe live shards, each given with any row of its tensor."""
        entries = [_entry(like, shard) for like, shard in wanted]
        kinds = (bool, np.int64, np.int64, bool, np.int64, np.uint64, np.int32, np.uint64, object)
        columns = [np.array(column, kind) for column, kind in zip(zip(*entries, strict=True), kinds, strict=True)]
        pointer, numel = columns[5], columns[2]
        # tied tensors are not gathered: Reads adds them one by one, and sees that their reads are the same
        _, which, count = np.unique(pointer, return_inverse=True, return_counts=True)
        columns[0] &= (count[which] == 1) | (numel == 0)
        return cls(*columns)


def _entry(like: Row, shard: Shard) -> tuple[object, ...]:
    part = shard.part
    begin, end = part.bounds
    fits = like.dtype.name == shard.dtype and end - begin == part.numel and is_row_major(shard.shape, shard.stride)
    place = arrays.place(shard, shard.stride) if fits else None
    if place is None:
        return False, 0, 0, False, 0, 0, 0, 0, like.key
    whole = part.flat is None and part.shape == part.global_shape
    itemsize = BY_NAME[like.dtype.name].itemsize
    return True, begin, part.numel, whole, itemsize, place.pointer, place.device, place.stream, like.key


def gather(found: Sequence[Sequence[FoundRow]], wanted: Sequence[tuple[Row, Shard]], reads: Reads) -> Sequence[bool]:
    """Queue the reads of live parts that are stretches of their flattened tensors, if all rows of them are, too.

    Args:
        found: For each part, the rows that may hold elements of it. Nothing is queued unless it is a ``Found``.
        wanted: For each part, any row of its tensor, and the live shard.
        reads: Gets the reads.

    Returns:
        For each part, whether the reads of all its elements were queued. Otherwise none is queued, neither for the part
        nor for other parts of the same tensor.
    """
    if not wanted or not isinstance(found, Found):
        return [False] * len(wanted)
    live = _Live.of(wanted)
    rows = [(held, Stretches.of(held.file.shards, held.file.data_offset, held.row)) for held in found.held]
    taken = live.fits.copy()
    for held, row in rows:
        taken[held.part[~row.is_one & (row.numel > 0)]] = False
    shared = [_shared(live, held.part, row) for held, row in rows]
    taken &= _covered(live, [held.part for held, _ in rows], shared) == live.numel
    left = set(live.key[~taken])
    taken &= np.array([key not in left for key in live.key], bool)
    owners = [shard.source for _, shard in wanted]
    for (held, row), (begin, nelements) in zip(rows, shared, strict=True):
        kept = taken[held.part] & (nelements > 0)
        if not kept.any():
            continue
        of, begin, nelements, row_begin = held.part[kept], begin[kept], nelements[kept], row.begin[kept]
        itemsize = live.itemsize[of]
        ranges = Ranges(
            offset=(row.offset[kept] + (begin - row_begin) * itemsize).astype(np.uint64),
            nbytes=(nelements * itemsize).astype(np.uint64),
            pointer=live.pointer[of] + ((begin - live.begin[of]) * itemsize).astype(np.uint64),
            device=live.device[of],
            stream=live.stream[of],
            whole=live.whole[of] & row.whole[kept],
            key=live.key[of],
        )
        reads.add_many(held.file, ranges, owners)
    queued: list[bool] = taken.tolist()
    return queued


def _shared(live: _Live, part: I64, row: Stretches) -> tuple[I64, I64]:
    """The elements that each row shares with live part number ``part``: first element in the tensor, and how many."""
    begin = np.maximum(live.begin[part], row.begin)
    end = np.minimum((live.begin + live.numel)[part], row.begin + row.numel)
    return begin, np.maximum(end - begin, 0)


def _covered(live: _Live, which: Sequence[I64], shared: Sequence[tuple[I64, I64]]) -> I64:
    """For each live part, how many of its elements are in any row, each counted once.

    ``which`` has the numbers of live parts and ``shared`` the elements of :func:`_shared`, both by file.
    """
    covered = np.zeros(len(live.numel), np.int64)
    if not which:
        return covered
    part = np.concatenate(which)
    begin, nelements = (np.concatenate(column) for column in zip(*shared, strict=True))
    # lay the parts one behind the other, with a gap between them
    first = np.cumsum(live.numel + 1) - live.numel - 1
    at = first[part] + begin - live.begin[part]
    order = np.flatnonzero(nelements > 0)
    order = order[np.argsort(at[order], kind="stable")]
    low, high = parts.union(at[order], (at + nelements)[order])
    np.add.at(covered, np.searchsorted(first, low, side="right") - 1, high - low)
    return covered
