"""Planning a save of which a part lies in another file already: what is still to be written. Pure functions.

Storage shares whole pages. So all that lies in a page with something to write is written, too, and only that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from datastates._base.columns import I64, Bools, as_u64
from datastates._base.sizes import CHUNK, DESCRIPTOR, LARGE_RECORD, PAGE
from datastates.planning.plans import WritePlan
from datastates.planning.write import cut_extents
from datastates.state.runs import pairs

MOST_RANGES = 10_000
"""Ranges with data that one file shares, at most. The storage takes some 20 µs for each, and updates wait meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialPlan:
    """A plan for a part of a file. Its sources are runs: chunks of one record that follow each other. In bytes.

    Attributes:
        plan: The plan. Its literal bytes are those of the whole file.
        written: For each chunk of the file, whether it is written.
        record: For each source, the number of its record.
        offset: For each source, the offset of its first byte in the record.
        patch: For each place of a checksum that is written, its offset in the literal bytes, and its record.
        shared: Offset and length of each range of whole pages that lies in the other file already.
    """

    plan: WritePlan
    written: Bools
    record: I64
    offset: I64
    patch: tuple[I64, I64]
    shared: tuple[I64, I64]


def plan_partial(
    plan: WritePlan, changed: Bools, atomic: Bools, block_nbytes: int, most_ranges: int = MOST_RANGES
) -> PartialPlan:
    """Plan the part of a file that cannot be shared with another file of the same layout.

    Args:
        plan: The plan of the whole file.
        changed: For each chunk, in file order, whether its bytes differ.
        atomic: For each record, whether all its chunks are written if one is.
        block_nbytes: Longest extent in bytes, a multiple of :data:`~datastates._base.sizes.PAGE`.
        most_ranges: Number of ranges to share, the longest ones. What lies in others is written, too.
    """
    layout = _Layout.of(plan)
    written, stretch, stretch_end = layout.spread(changed, atomic)
    before = np.append(0, stretch_end)[:-1]
    if len(stretch) > most_ranges:
        short = np.sort(np.argsort(before - stretch, kind="stable")[most_ranges:])
        more = _touch(layout.begin, layout.chunk_end, before[short], stretch[short])
        written, stretch, stretch_end = layout.spread(written | more, atomic)
        before = np.append(0, stretch_end)[:-1]
    record, begin, end = layout.runs(written)

    places = (plan.extent_offset[plan.patch_extent] + plan.patch_offset).astype(np.int64)
    extent, extent_end = _extents(stretch, np.minimum(stretch_end, plan.end), places, block_nbytes)
    # a piece begins where a run begins or ends, and where an extent begins
    starts = np.unique(np.concatenate((extent, begin, end)))
    of = np.searchsorted(extent, starts, side="right") - 1
    starts, of = starts[is_in := starts < extent_end[of]], of[is_in]
    ends = np.minimum(np.append(starts[1:], plan.end), extent_end[of])
    run = np.searchsorted(begin, starts, side="right") - 1
    is_data = (run >= 0) & (starts < np.append(end, 0)[run])
    offset = starts - np.where(is_data, np.append(begin, 0)[run], layout.data_before(starts))

    number = np.argsort(plan.order)[plan.patch_source]
    is_written = _touch(places, places + 1, stretch, stretch_end)
    places, number = places[is_written], number[is_written]
    low, high = (np.searchsorted(record, number, side=side) for side in ("left", "right"))
    which, source = pairs(low, high)  # each run of a record adds to the record's checksum
    patched = np.searchsorted(extent, places[which], side="right") - 1
    return PartialPlan(
        plan=replace(
            plan,
            order=np.arange(len(begin)),
            source_nbytes=as_u64(end - begin),
            eager=np.zeros(len(begin), np.uint8),
            extent_offset=as_u64(extent),
            extent_length=as_u64(extent_end - extent),
            extent_piece=as_u64(np.searchsorted(of, np.arange(len(extent) + 1))),
            piece_source=np.where(is_data, run, -1).astype(np.int32),
            piece_source_offset=as_u64(offset),
            piece_extent_offset=as_u64(starts - extent[of]),
            piece_length=as_u64(ends - starts),
            patch_extent=as_u64(patched),
            patch_offset=as_u64(places[which] - extent[patched]),
            patch_source=source.astype(np.int32),
            patch_after=as_u64(layout.data_end[record][source] - end[source]),
        ),
        written=written,
        record=record,
        offset=begin - plan.data_offset.astype(np.int64)[record],
        patch=(places - layout.data_before(places), number),
        shared=(before[before < stretch], (stretch - before)[before < stretch]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Places in the file of a plan: of records, and of chunks, in file order."""

    data: I64
    data_end: I64
    end: int
    record: I64
    """The number of the record of each chunk."""
    begin: I64
    chunk_end: I64

    @classmethod
    def of(cls, plan: WritePlan) -> _Layout:
        nbytes, data = plan.source_nbytes.astype(np.int64)[plan.order], plan.data_offset.astype(np.int64)
        record, number = pairs(np.zeros(len(nbytes), np.int64), -(-nbytes // CHUNK))
        begin = data[record] + number * CHUNK
        return cls(data, data + nbytes, plan.end, record, begin, np.minimum(begin + CHUNK, (data + nbytes)[record]))

    def spread(self, changed: Bools, atomic: Bools) -> tuple[Bools, I64, I64]:
        """The chunks to write, and the begins and ends of the pages that hold them."""
        is_changed = self._some(changed)
        frames = self.data_end[is_changed], self.data_end[is_changed] + DESCRIPTOR
        last = np.array([max(self.end - 1, 0)]), np.array([self.end])  # what follows is written behind it
        small = self.data_end - self.data < LARGE_RECORD
        joined = small[1:] & small[:-1] & (self.data[1:] // PAGE <= (self.data_end[:-1] + DESCRIPTOR - 1) // PAGE)
        group = np.cumsum(np.append(True, ~joined))[: len(small)] - 1  # small records that share pages
        written = changed
        while True:
            some = self._some(written)
            of_group = np.zeros(len(group), bool)
            of_group[group[some]] = True
            written = written | ((some & atomic) | (of_group[group] & small))[self.record]
            low = np.concatenate((self.begin[written], frames[0], last[0])) // PAGE
            high = -(-np.concatenate((self.chunk_end[written], frames[1], last[1])) // PAGE)
            begin, end = _merged(low, high)
            more = _touch(self.begin, self.chunk_end, begin * PAGE, end * PAGE)
            if (more == written).all():
                return written, begin * PAGE, end * PAGE
            written = more

    def _some(self, chunks: Bools) -> Bools:
        result = np.zeros(len(self.data), bool)
        result[self.record[chunks]] = True
        return result

    def runs(self, chunks: Bools) -> tuple[I64, I64, I64]:
        """Record, begin and end of each run of chunks that follow each other in a record."""
        chosen = np.flatnonzero(chunks)
        parted = (np.diff(chosen) > 1) | (np.diff(self.record[chosen]) > 0)
        first, last = chosen[np.append(True, parted)[: len(chosen)]], chosen[np.append(parted, True)[: len(chosen)]]
        return self.record[first], self.begin[first], self.chunk_end[last]

    def data_before(self, places: I64) -> I64:
        """Bytes of records' data before places that lie in none."""
        before = np.append(0, np.cumsum(self.data_end - self.data))
        return before[np.searchsorted(self.data_end, places, side="right")]


def _extents(begin: I64, end: I64, checksums: I64, block_nbytes: int) -> tuple[I64, I64]:
    """Cut stretches of a file into extents; returns their begins and ends."""
    cut = [
        b + cut_extents(e - b, checksums - b, block_nbytes) if e - b > block_nbytes else np.array([b, e])
        for b, e in zip(begin.tolist(), end.tolist(), strict=True)
    ]
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *(one[:-1] for one in cut)]), np.concatenate([none, *(one[1:] for one in cut)])


def _merged(begin: I64, end: I64) -> tuple[I64, I64]:
    """Merge ranges that touch or overlap."""
    order = np.argsort(begin, kind="stable")
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    parted = begin[1:] > reached[:-1]
    return begin[np.append(True, parted)], reached[np.append(parted, True)]


def _touch(begin: I64, end: I64, low: I64, high: I64) -> Bools:
    """For each range, whether it has a byte in common with one of the ranges from ``low`` to ``high``, which ascend."""
    following = np.searchsorted(high, begin, side="right")
    return np.append(low, np.iinfo(np.int64).max)[following] < end
