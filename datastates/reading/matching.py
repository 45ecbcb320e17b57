"""Matches live parts of tensors with stored parts in columns of numbers, and queues the reads that fill the live ones.

It serves two kinds of live part: one that is stored as the same part, and one that is a stretch of its flattened tensor
if all stored parts of it are, too. All of them lie in row-major order, in memory and in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from datastates._base.columns import I32, I64, U64, Bools
from datastates.container.part_columns import PartColumns
from datastates.container.table import BOX, WHOLE, table_of
from datastates.reading.read_queue import Ranges
from datastates.reading.reads import Reads
from datastates.reading.tensors import Held
from datastates.state import arrays, devices, parts, tensor_scan
from datastates.state.destinations import Destinations
from datastates.state.shards import Buffer, Shard
from datastates.state.strides import aligned


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """Live parts of tensors, one entry of each column for each.

    Attributes:
        part: The parts.
        fits: Whether the part's memory can be read into, in row-major order.
        pointer, device, stream: As in :class:`~datastates.state.shards.Buffer`.
        tensor: A number for each logical tensor; parts of the same tensor have the same.
        owners: Objects that keep the memory alive.
    """

    part: PartColumns
    fits: Bools
    pointer: U64
    device: I32
    stream: U64
    tensor: I64
    owners: object

    @classmethod
    def of_tensors(cls, given: Destinations) -> Live | None:
        """Describe torch tensors, without an object for each; None if one cannot be described so.

        Raises:
            ProviderError: The local tensor of a DTensor is not one box of the logical tensor.
        """
        tensors, sharded = given.memory
        seen = tensor_scan.layout(tensors)
        if seen is None:
            return None
        ndim = seen.ndim.astype(np.int64)
        starts, width = np.cumsum(ndim) - ndim, int(ndim.max(initial=0))
        shape, stride = aligned(seen.dims, starts, ndim, width, 1), aligned(seen.strides, starts, ndim, width, 0)
        kind, global_shape, place = np.full(len(ndim), WHOLE, np.uint8), shape.copy(), np.zeros_like(shape)
        fits = np.ones(len(ndim), bool)
        for i in sharded:
            own = shape[i, width - ndim[i] :]
            held = given.part(i, tuple(own.tolist()))
            if held.offset is None:  # this rank is not in the mesh
                fits[i] = False
            elif held.global_shape != tuple(own.tolist()):
                kind[i] = BOX
                global_shape[i, width - ndim[i] :] = held.global_shape
                place[i, width - ndim[i] :] = held.offset
        part = PartColumns.made(seen.dtype, kind, shape, stride, ndim, global_shape, place)
        fits &= part.in_order & ((seen.address != 0) | (part.numel == 0))
        tensor = _numbered(given.keys)
        return cls(part, fits, seen.address, seen.device, devices.streams(seen.device), tensor, given.values)

    @classmethod
    def of_shards(cls, shards: Sequence[Shard]) -> Live:
        """Describe live parts of any kind; contradictions between a shard and its array are not looked for."""
        table = table_of(("",), [(0, shard) for shard in shards], [0] * len(shards))
        part = PartColumns.of(table, np.arange(len(shards)))
        places = [arrays.place(s, s.stride) if ok else None for s, ok in zip(shards, part.in_order, strict=True)]
        return cls._at(part, places, _numbered([shard.key for shard in shards]), [shard.source for shard in shards])

    @classmethod
    def of_new(cls, part: PartColumns, memory: Sequence[Buffer]) -> Live:
        """Describe whole tensors in new memory, in row-major order."""
        return cls._at(part, memory, np.arange(len(memory)), memory)

    @classmethod
    def _at(cls, part: PartColumns, places: Sequence[Buffer | None], tensor: I64, owners: object) -> Live:
        fits = np.array([place is not None for place in places], bool)
        known = [place or Buffer(0, 0) for place in places]
        pointer: U64 = np.array([place.pointer for place in known], np.uint64)
        device: I32 = np.array([place.device for place in known], np.int32)
        stream: U64 = np.array([place.stream for place in known], np.uint64)
        return cls(part, fits, pointer, device, stream, tensor, owners)

    def only(self, which: I64) -> Live:
        """The same live parts, of which only these fit."""
        fits = np.zeros_like(self.fits)
        fits[which] = self.fits[which]
        return replace(self, fits=fits)


def _numbered(keys: Sequence[str]) -> I64:
    """A number for each key, the same for equal keys."""
    if len(first := dict.fromkeys(keys)) == len(keys):
        return np.arange(len(keys))
    numbers = dict(zip(first, range(len(first)), strict=True))
    return np.array([numbers[key] for key in keys], np.int64)


def match(live: Live, held: Sequence[Held], named: Callable[[int], str], reads: Reads) -> tuple[Bools, Bools]:
    """Queue the reads of live parts that these stored rows fill.

    Args:
        live: The live parts.
        held: The rows that may hold elements of them.
        named: The full key in the checkpoint, for the number of a live part.
        reads: Gets the reads.

    Returns:
        For each live part, whether the reads of all its elements were queued. Otherwise none is queued, neither for it
        nor for other parts of the same tensor. Then for each, whether its memory can be read into in row-major order,
        and all its rows, at least one, are of a tensor of the live one's element type and shape.
    """
    rows = [PartColumns.of(one.file.shards, one.row) for one in held]
    fits, known, count = live.fits.copy(), np.zeros_like(live.fits), np.zeros(len(live.fits), np.int64)
    owns = [live.part[one.part] for one in held]
    for one, row, own in zip(held, rows, owns, strict=True):
        known[one.part] = True
        fits[one.part[~own.of_same_tensors(row)]] = False
        np.add.at(count, one.part[row.numel > 0], 1)
    fits &= known
    taken, shared = fits.copy(), []
    for one, row, own in zip(held, rows, owns, strict=True):
        alike = own.are(row) & (count[one.part] == 1)
        serves = (row.numel == 0) | (row.in_order & (alike | (row.is_range & own.is_range)))
        taken[one.part[~serves]] = False
        begin = np.maximum(own.begin, row.begin)
        end = np.minimum(own.begin + own.numel, row.begin + row.numel)
        shared.append((begin, np.maximum(end - begin, 0)))
    taken &= _covered(live.part, [one.part for one in held], shared) == live.part.numel
    in_part = np.zeros(len(taken), bool)
    in_part[live.tensor[~taken]] = True
    taken &= ~in_part[live.tensor]
    for one, row, (begin, numel) in zip(held, rows, shared, strict=True):
        kept = np.flatnonzero(taken[one.part] & (numel > 0))
        if len(kept):
            ranges = _ranges(live, one, row, kept, begin[kept], numel[kept], named)
            reads.add_many(one.file, ranges, live.owners)
    return taken, fits


def _ranges(
    live: Live, held: Held, row: PartColumns, kept: I64, begin: I64, numel: I64, named: Callable[[int], str]
) -> Ranges:
    """The ranges of a file that these pairs of live part and row share; ``begin`` is in the flattened tensor."""
    of, itemsize = held.part[kept], tensor_scan.ITEMSIZES[row.dtype[kept]].astype(np.int64)
    table, number = held.file.shards, held.row[kept]
    first = held.file.data_offset[table.record[number]] + table.offset[number]
    whole = (live.part.kind[of] == WHOLE) & (row.kind[kept] == WHOLE)
    verified = whole & held.file.checked
    ranges = Ranges(
        offset=first + ((begin - row.begin[kept]) * itemsize).astype(np.uint64),
        nbytes=(numel * itemsize).astype(np.uint64),
        pointer=live.pointer[of] + ((begin - live.part.begin[of]) * itemsize).astype(np.uint64),
        device=live.device[of],
        stream=live.stream[of],
        whole=whole,
        key=np.array(["" if known else named(i) for i, known in zip(of.tolist(), verified, strict=True)], object),
    )
    pointer = np.sort(ranges.pointer)
    is_tied = (pointer[1:] == pointer[:-1]).any()
    return Ranges.joined([ranges]) if is_tied else ranges  # each memory is read once


def _covered(live: PartColumns, which: Sequence[I64], shared: Sequence[tuple[I64, I64]]) -> I64:
    """For each live part, how many of its elements are in any row, each counted once.

    ``which`` has the numbers of live parts; ``shared`` the first of the shared elements in the tensor, and how many
    they are. Both are by file.
    """
    covered = np.zeros(len(live), np.int64)
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
