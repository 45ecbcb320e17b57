"""Planning a restore: turns wanted ranges of a file into reads. Pure functions: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from datastates._base.columns import I32, I64, U8, U64, Bools, as_u64
from datastates._base.sizes import CHUNK
from datastates.planning.plans import Chunks, ReadPlan
from datastates.state import parts

GAP = 64 * 1024
"""Longest gap in bytes between two wanted ranges that is read over, as that is cheaper than a second read."""
WASTE = 32
"""Number of wanted bytes for which one unwanted byte may be read. With the whole pages that direct I/O reads, and the
frames between large records, less than 1.05 bytes are read for each wanted byte."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """The wanted ranges of a file, ascending.

    Attributes:
        begin, end: File offsets of each range.
        first, last: The numbers of the chunks that it intersects, from ``first`` to before ``last``.
        chunk_begin, chunk_end: File offsets of each chunk.
        union: Begins and ends of the disjoint stretches that the ranges make together.
    """

    begin: I64
    end: I64
    first: I64
    last: I64
    chunk_begin: I64
    chunk_end: I64
    union: tuple[I64, I64]

    @classmethod
    def of(cls, begin: I64, nbytes: I64, chunks: Chunks) -> _Ranges:
        end, chunk_begin = begin + nbytes, chunks.offset.astype(np.int64)
        chunk_end = chunk_begin + chunks.length.astype(np.int64)
        first = np.searchsorted(chunk_end, begin, side="right")
        last = np.searchsorted(chunk_begin, end, side="left")
        return cls(begin, end, first, last, chunk_begin, chunk_end, parts.union(begin, end))

    @property
    def needed_nbytes(self) -> int:
        return int((self.union[1] - self.union[0]).sum())

    def coverage(self, weight: I64 | int = 1) -> I64:
        """For each chunk, the sum of the weights of the ranges that intersect it."""
        marks = np.zeros(len(self.chunk_begin) + 1, np.int64)
        np.add.at(marks, self.first, weight)
        np.add.at(marks, self.last, -weight)
        return np.cumsum(marks[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """What is read of a file, ascending: whole chunks, which are verified, and stretches of others.

    Attributes:
        begin, end: File offsets of each segment.
        chunk: The number of its chunk.
        verified: Whether it is a whole chunk that is verified.
    """

    begin: I64
    end: I64
    chunk: I64
    verified: Bools

    @property
    def nbytes(self) -> I64:
        return self.end - self.begin


def plan_chunks(data_offset: U64, nbytes: U64, crcs: np.ndarray) -> Chunks:
    """Make the chunks of a file's records.

    Args:
        data_offset: File offset of each record's data, ascending.
        nbytes: Length of each record in bytes.
        crcs: CRC-32 of each chunk, in file order.
    """
    lengths = nbytes.astype(np.int64)
    counts = -(-lengths // CHUNK)
    record = np.repeat(np.arange(len(lengths)), counts)
    ordinal = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = data_offset.astype(np.int64)[record] + ordinal * CHUNK
    length = np.minimum(CHUNK, lengths[record] - ordinal * CHUNK)
    return Chunks(record.astype(np.int32), as_u64(offset), as_u64(length), np.ascontiguousarray(crcs, dtype=np.uint32))


def plan_read(
    file_offset: U64,
    nbytes: U64,
    dest: I32,
    dest_offset: U64,
    dest_nbytes: U64,
    in_place: U8,
    whole: U8,
    chunks: Chunks,
    extent_nbytes: int,
    spare_nbytes: int = 0,
) -> ReadPlan:
    """Plan the reading of file ranges into destinations, and verify what costs few unwanted bytes.

    A chunk can only be verified if all of it is read. The plan therefore has a budget of unwanted bytes: one byte
    for :data:`WASTE` wanted ones, but at least ``spare_nbytes``. If the budget suffices, every chunk with a wanted byte
    is read as a whole and verified. If not, the chunks with the largest wanted share are verified. Of the others only
    the wanted bytes are read, and the plan lists them as unverified. What is left of the budget is used to read over
    gaps of up to :data:`GAP`, shortest first. Frames between consecutive chunks that are read whole are always read
    over, because a file of many small records consists largely of frames; they count against the budget.

    Of chunks without checksums only the wanted bytes are read. There the budget for gaps is the number of wanted bytes:
    half of the columns of a matrix, for example, are many short stretches, whose cost is their number.

    A large record that can be read straight into its destination has extents of its own. Small stretches share an
    extent, even with gaps between them that are not read.

    Args:
        file_offset: File offset of each wanted range. A range lies within one record; ranges may overlap.
        nbytes: Length of each range in bytes.
        dest: Number of the destination that each range goes to.
        dest_offset: Offset of each range in its destination, in bytes.
        dest_nbytes: Length of each destination in bytes.
        in_place: For each destination, 1 if the storage can be read straight into it.
        whole: For each destination, 1 if all of its chunks that have checksums must be verified, at any cost.
        chunks: The file's chunks.
        extent_nbytes: Longest extent in bytes; more than a chunk and a gap.
        spare_nbytes: Unwanted bytes that may be read in any case, so that a small state is verified completely.
    """
    order = np.argsort(file_offset, kind="stable")
    order = order[nbytes[order] > 0]
    dest, dest_offset = dest[order], dest_offset[order].astype(np.int64)
    ranges = _Ranges.of(file_offset[order].astype(np.int64), nbytes[order].astype(np.int64), chunks)
    segments, left = _read_segments(ranges, whole[dest], chunks, spare_nbytes)
    bridged = _bridges(segments, ranges, left)
    straight = ranges.coverage(in_place[dest].astype(np.int64)) > 0
    record = chunks.record[segments.chunk]
    starts = _extent_starts(segments, record, straight[segments.chunk], bridged, extent_nbytes)
    extents = segments.begin[starts], segments.end[_lasts(starts, len(record))]
    begins = np.append(True, ~bridged)[: len(record)]
    begins[starts] = True
    spans = np.flatnonzero(begins)
    checks = np.flatnonzero(segments.verified)
    within = extents[0][np.searchsorted(starts, np.arange(len(record)), side="right") - 1]
    which, extent = _pieces(ranges, *extents)
    begin, end = np.maximum(ranges.begin[which], extents[0][extent]), np.minimum(ranges.end[which], extents[1][extent])
    return ReadPlan(
        extent_offset=as_u64(extents[0]),
        extent_length=as_u64(extents[1] - extents[0]),
        extent_span=as_u64(np.searchsorted(spans, np.append(starts, len(record)))),
        span_offset=as_u64((segments.begin - within)[spans]),
        span_length=as_u64(segments.end[_lasts(spans, len(record))] - segments.begin[spans]),
        extent_piece=as_u64(np.searchsorted(extent, np.arange(len(starts) + 1))),
        piece_dest=np.ascontiguousarray(dest[which], dtype=np.int32),
        piece_dest_offset=as_u64(dest_offset[which] + begin - ranges.begin[which]),
        piece_extent_offset=as_u64(begin - extents[0][extent]),
        piece_length=as_u64(end - begin),
        extent_check=as_u64(np.searchsorted(checks, np.append(starts, len(record)))),
        check_offset=as_u64((segments.begin - within)[checks]),
        check_length=as_u64(segments.nbytes[checks]),
        check_crc=np.ascontiguousarray(chunks.crc[segments.chunk[checks]]),
        check_record=np.ascontiguousarray(record[checks], dtype=np.int32),
        dest_nbytes=as_u64(dest_nbytes),
        needed_nbytes=ranges.needed_nbytes,
        unverified_offset=as_u64(segments.begin[~segments.verified]),
        unverified_length=as_u64(segments.nbytes[~segments.verified]),
    )


def plan_ahead(chunks: Chunks, count: int, *, complete: bool, in_place: bool, extent_nbytes: int) -> ReadPlan:
    """Plan the first extents of a file that is wanted whole, as :func:`plan_read` does, but without destinations.

    Args:
        chunks: The file's first chunks.
        count: Largest number of extents.
        complete: Whether these are all chunks of the file. If not, the last extent is left out, as it may be longer.
        in_place: Whether the storage can be read straight into all destinations.
        extent_nbytes: Longest extent in bytes; see :func:`plan_read`.
    """
    zero = np.zeros(len(chunks.offset) + 1, np.uint64)
    whole = plan_read(
        file_offset=chunks.offset,
        nbytes=chunks.length,
        dest=zero[1:].astype(np.int32),
        dest_offset=zero[1:],
        dest_nbytes=np.array([2**62], np.uint64),
        in_place=np.array([in_place], np.uint8),
        whole=np.ones(1, np.uint8),
        chunks=chunks,
        extent_nbytes=extent_nbytes,
    )
    extents = min(count, max(0, len(whole.extent_offset) - (not complete)))
    pieces = ("piece_dest", "piece_dest_offset", "piece_extent_offset", "piece_length", "dest_nbytes")
    checks = ("check_offset", "check_length", "check_crc", "check_record", "unverified_offset", "unverified_length")
    spans = int(whole.extent_span[extents])
    return replace(
        whole,
        extent_offset=whole.extent_offset[:extents],
        extent_length=whole.extent_length[:extents],
        extent_span=whole.extent_span[: extents + 1],
        span_offset=whole.span_offset[:spans],
        span_length=whole.span_length[:spans],
        extent_piece=zero[: extents + 1],
        extent_check=zero[: extents + 1],
        needed_nbytes=int(whole.span_length[:spans].sum()),
        **{name: getattr(whole, name)[:0] for name in pieces + checks},
    )


def _read_segments(ranges: _Ranges, whole: U8, chunks: Chunks, spare_nbytes: int) -> tuple[_Segments, int]:
    """Choose what to read and what to verify; returns that, and how many more bytes may be read in vain.

    ``whole`` says of each range whether its chunks must be verified at any cost.
    """
    wanted = np.flatnonzero(ranges.coverage() > 0)
    begin, end = ranges.chunk_begin[wanted], ranges.chunk_end[wanted]
    every = _Segments(begin, end, wanted, np.full(len(wanted), chunks.checked))
    if not chunks.checked:
        return _loosened(ranges.union, every), ranges.needed_nbytes
    frames = int((begin[1:] - end[:-1])[np.diff(wanted) == 1].sum())
    left = max(ranges.needed_nbytes // WASTE, spare_nbytes) - frames
    wasted = int((end - begin).sum()) - ranges.needed_nbytes
    if wasted <= left or wasted <= 0:
        return every, left - wasted
    must = ranges.coverage(whole.astype(np.int64))[wanted] > 0
    verified, wasted = _choose(end - begin, bytes_between(*ranges.union, begin, end), must, left)
    return _loosened(ranges.union, replace(every, verified=verified)), left - wasted


def _lasts(starts: I64, count: int) -> I64:
    """The last number of each run, given the first ones; ``count`` numbers in all."""
    return np.append(starts[1:] - 1, count - 1)[: len(starts)]


def _pieces(ranges: _Ranges, begin: I64, end: I64) -> tuple[I64, I64]:
    """Each range with each extent that it intersects, ordered by extent, as two columns of numbers."""
    which, extent = _pairs(
        np.searchsorted(end, ranges.begin, side="right"), np.searchsorted(begin, ranges.end, side="left")
    )
    order = np.argsort(extent, kind="stable")
    return which[order], extent[order]


def _pairs(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs ``(i, j)`` with ``low[i] <= j < high[i]``, as two columns."""
    counts = high - low
    which = np.repeat(np.arange(len(low)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - low, counts)


def bytes_between(begin: I64, end: I64, low: I64, high: I64) -> I64:
    """Number of bytes of disjoint, ascending stretches in each range from ``low`` to before ``high``."""
    before = np.cumsum(end - begin) - (end - begin)

    def below(position: I64) -> I64:
        at = np.searchsorted(begin, position, side="right") - 1
        return np.where(at < 0, 0, before[at] + np.minimum(position, end[at]) - begin[at])

    return below(high) - below(low)


def _choose(nbytes: np.ndarray, wanted: np.ndarray, must: np.ndarray, left: int) -> tuple[np.ndarray, int]:
    """Choose the chunks to verify with a budget of ``left`` unwanted bytes; also returns how many of them it costs."""
    wasted = nbytes - wanted
    verified = must | (wasted == 0)
    spent = int(wasted[verified].sum())
    others = np.flatnonzero(~verified)
    others = others[np.argsort(wasted[others] / nbytes[others], kind="stable")]
    verified[others[spent + np.cumsum(wasted[others]) <= left]] = True
    return verified, int(wasted[verified].sum())


def _loosened(stretches: tuple[I64, I64], every: _Segments) -> _Segments:
    """Chunks that are not verified are cut down to what is wanted of them."""
    which, chunk = _pairs(
        np.searchsorted(every.end, stretches[0], side="right"), np.searchsorted(every.begin, stretches[1], side="left")
    )
    loose = ~every.verified[chunk]
    which, chunk = which[loose], chunk[loose]
    kept = every.verified
    begin = np.concatenate((every.begin[kept], np.maximum(stretches[0][which], every.begin[chunk])))
    end = np.concatenate((every.end[kept], np.minimum(stretches[1][which], every.end[chunk])))
    numbers = np.concatenate((every.chunk[kept], every.chunk[chunk]))
    order = np.argsort(begin, kind="stable")
    return _Segments(begin[order], end[order], numbers[order], (np.arange(len(order)) < kept.sum())[order])


def _bridges(segments: _Segments, ranges: _Ranges, left: int) -> Bools:
    """Mark the gaps between segments to read over: all frames, then the shortest gaps up to ``left`` bytes in total.

    A frame is the gap between two consecutive chunks that are both read whole.
    """
    begin, end, chunk = segments.begin, segments.end, segments.chunk
    is_whole = (begin == ranges.chunk_begin[chunk]) & (end == ranges.chunk_end[chunk])
    gap = begin[1:] - end[:-1]
    frame = is_whole[1:] & is_whole[:-1] & (np.diff(chunk) == 1)
    bridged = (gap <= GAP) & (frame | (gap == 0))
    more = np.flatnonzero((gap <= GAP) & ~bridged)
    more = more[np.argsort(gap[more], kind="stable")]
    bridged[more[np.cumsum(gap[more]) <= left]] = True
    return np.asarray(bridged)


def _extent_starts(segments: _Segments, record: I32, in_place: Bools, bridged: Bools, extent_nbytes: int) -> I64:
    """Numbers of the segments that begin a new extent. ``record`` and ``in_place`` are of each segment."""
    begin, nbytes = segments.begin, segments.nbytes
    if not len(begin):
        return np.zeros(0, np.int64)
    size = np.zeros(int(record.max()) + 1, np.int64)
    np.add.at(size, record, nbytes)
    alone = in_place & (size[record] > CHUNK)
    new_record = np.append(True, record[1:] != record[:-1])
    breaks = new_record & (alone | np.append(False, alone[:-1]))
    # a gap that is not read over begins a new extent, except between two small stretches
    span = np.cumsum(np.append(True, ~bridged)) - 1
    small = np.bincount(span, nbytes) < GAP
    gap = begin[1:] - segments.end[:-1]
    breaks |= np.append(True, (gap > GAP) | (~bridged & ~(small[span[1:]] & small[span[:-1]])))
    # cut a run where the distance from its begin crosses a multiple of the longest extent less a chunk and a gap
    run = np.cumsum(breaks) - 1
    distance = begin - begin[breaks][run]
    slot = distance // (extent_nbytes - CHUNK - GAP)
    breaks[1:] |= (run[1:] == run[:-1]) & (slot[1:] != slot[:-1])
    return np.flatnonzero(breaks)
