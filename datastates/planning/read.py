"""Planning a restore: turns wanted ranges of a file into reads. Pure functions: no I/O, no clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from datastates._base.columns import I32, I64, U8, U64, as_u64
from datastates._base.sizes import CHUNK
from datastates.planning.plans import Chunks, ReadPlan
from datastates.state import parts

GAP = 64 * 1024
"""Longest gap in bytes between two wanted ranges that is read over, as that is cheaper than a second read."""
WASTE = 32
"""Number of wanted bytes for which one unwanted byte may be read. With the whole pages that direct I/O reads, and the
frames between large records, less than 1.05 bytes are read for each wanted byte."""


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
    begin = file_offset[order].astype(np.int64)
    end = begin + nbytes[order].astype(np.int64)
    stretches = parts.union(begin, end)
    needed = int((stretches[1] - stretches[0]).sum())
    chunk_begin = chunks.offset.astype(np.int64)
    chunk_end = chunk_begin + chunks.length.astype(np.int64)
    first = np.searchsorted(chunk_end, begin, side="right")
    last = np.searchsorted(chunk_begin, end, side="left")
    wanted = np.flatnonzero(_coverage(first, last, len(chunk_begin)) > 0)
    w_begin, w_end = chunk_begin[wanted], chunk_end[wanted]

    bounds = w_begin, w_end, wanted
    verified = np.full(len(wanted), chunks.checked)
    left = max(needed // WASTE, spare_nbytes) - int((w_begin[1:] - w_end[:-1])[np.diff(wanted) == 1].sum())
    wasted = int((w_end - w_begin).sum()) - needed
    if not chunks.checked:
        left, wasted = needed, 0
        bounds, verified = _segments(stretches, bounds, verified)
    elif wasted > left and wasted > 0:
        must = _coverage(first, last, len(chunk_begin), whole[dest[order]].astype(np.int64))[wanted] > 0
        verified, wasted = _choose(w_end - w_begin, bytes_between(*stretches, w_begin, w_end), must, left)
        bounds, verified = _segments(stretches, bounds, verified)
    s_begin, s_end, s_chunk = bounds
    record = chunks.record[s_chunk]
    straight = _coverage(first, last, len(chunk_begin), in_place[dest[order]].astype(np.int64)) > 0
    complete = (s_begin == chunk_begin[s_chunk]) & (s_end == chunk_end[s_chunk])
    bridged = _bridges(s_begin, s_end, s_chunk, complete, left - wasted)
    starts = _extent_starts(s_begin, s_end, record, straight[s_chunk], bridged, extent_nbytes)
    extent_begin = s_begin[starts]
    extent_end = s_end[np.append(starts[1:] - 1, len(s_begin) - 1)[: len(starts)]]
    segment_extent = np.searchsorted(starts, np.arange(len(s_begin)), side="right") - 1
    begins = np.append(True, ~bridged)[: len(s_begin)]
    begins[starts] = True
    spans = np.flatnonzero(begins)
    checks = np.flatnonzero(verified)

    # each extent that a range intersects has a piece of it
    which, extent = _pairs(
        np.searchsorted(extent_end, begin, side="right"), np.searchsorted(extent_begin, end, side="left")
    )
    by_extent = np.argsort(extent, kind="stable")
    which, extent = which[by_extent], extent[by_extent]
    piece_begin = np.maximum(begin[which], extent_begin[extent])
    piece_end = np.minimum(end[which], extent_end[extent])
    return ReadPlan(
        extent_offset=as_u64(extent_begin),
        extent_length=as_u64(extent_end - extent_begin),
        extent_span=as_u64(np.searchsorted(spans, np.append(starts, len(s_begin)))),
        span_offset=as_u64(s_begin[spans] - extent_begin[segment_extent[spans]]),
        span_length=as_u64(s_end[np.append(spans[1:] - 1, len(s_begin) - 1)[: len(spans)]] - s_begin[spans]),
        extent_piece=as_u64(np.searchsorted(extent, np.arange(len(extent_begin) + 1))),
        piece_dest=np.ascontiguousarray(dest[order][which], dtype=np.int32),
        piece_dest_offset=as_u64(dest_offset[order][which].astype(np.int64) + piece_begin - begin[which]),
        piece_extent_offset=as_u64(piece_begin - extent_begin[extent]),
        piece_length=as_u64(piece_end - piece_begin),
        extent_check=as_u64(np.searchsorted(checks, np.append(starts, len(s_begin)))),
        check_offset=as_u64(s_begin[checks] - extent_begin[segment_extent[checks]]),
        check_length=as_u64(s_end[checks] - s_begin[checks]),
        check_crc=np.ascontiguousarray(chunks.crc[s_chunk[checks]]),
        check_record=np.ascontiguousarray(record[checks], dtype=np.int32),
        dest_nbytes=as_u64(dest_nbytes),
        needed_nbytes=needed,
        unverified_offset=as_u64(s_begin[~verified]),
        unverified_length=as_u64((s_end - s_begin)[~verified]),
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


def _coverage(first: np.ndarray, last: np.ndarray, n: int, weight: np.ndarray | int = 1) -> np.ndarray:
    """For each of ``n`` chunks, the total weight of the ranges on it; a range covers ``first`` to before ``last``."""
    marks = np.zeros(n + 1, np.int64)
    np.add.at(marks, first, weight)
    np.add.at(marks, last, -weight)
    return np.cumsum(marks[:-1])


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


def _segments(
    stretches: tuple[I64, I64], chunks: tuple[np.ndarray, np.ndarray, np.ndarray], verified: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """The segments to read, in file order: the chunks to verify, and the wanted bytes of the others.

    Chunks and segments are columns of begins, ends and chunk numbers. The second result marks the segments that are
    chunks to verify.
    """
    begin, end, number = chunks
    which, chunk = _pairs(
        np.searchsorted(end, stretches[0], side="right"), np.searchsorted(begin, stretches[1], side="left")
    )
    loose = ~verified[chunk]
    which, chunk = which[loose], chunk[loose]
    all_begin = np.concatenate((begin[verified], np.maximum(stretches[0][which], begin[chunk])))
    all_end = np.concatenate((end[verified], np.minimum(stretches[1][which], end[chunk])))
    order = np.argsort(all_begin, kind="stable")
    is_chunk = np.arange(len(order)) < verified.sum()
    numbers = np.concatenate((number[verified], number[chunk]))
    return (all_begin[order], all_end[order], numbers[order]), is_chunk[order]


def _bridges(begin: np.ndarray, end: np.ndarray, chunk: np.ndarray, complete: np.ndarray, left: int) -> np.ndarray:
    """Mark the gaps between segments to read over: all frames, then the shortest gaps up to ``left`` bytes in total.

    A frame is the gap between two consecutive chunks that are both read whole (``complete``).
    """
    gap = begin[1:] - end[:-1]
    frame = complete[1:] & complete[:-1] & (np.diff(chunk) == 1)
    bridged = (gap <= GAP) & (frame | (gap == 0))
    more = np.flatnonzero((gap <= GAP) & ~bridged)
    more = more[np.argsort(gap[more], kind="stable")]
    bridged[more[np.cumsum(gap[more]) <= left]] = True
    return np.asarray(bridged)


def _extent_starts(
    begin: np.ndarray,
    end: np.ndarray,
    record: np.ndarray,
    in_place: np.ndarray,
    bridged: np.ndarray,
    extent_nbytes: int,
) -> np.ndarray:
    """Numbers of the segments that begin a new extent."""
    if not len(begin):
        return np.zeros(0, np.int64)
    size = np.zeros(int(record.max()) + 1, np.int64)
    np.add.at(size, record, end - begin)
    alone = in_place & (size[record] > CHUNK)
    new_record = np.append(True, record[1:] != record[:-1])
    breaks = new_record & (alone | np.append(False, alone[:-1]))
    # a gap that is not read over begins a new extent, except between two small stretches
    span = np.cumsum(np.append(True, ~bridged)) - 1
    small = np.bincount(span, end - begin) < GAP
    gap = begin[1:] - end[:-1]
    breaks |= np.append(True, (gap > GAP) | (~bridged & ~(small[span[1:]] & small[span[:-1]])))
    # cut a run where the distance from its begin crosses a multiple of the longest extent less a chunk and a gap
    run = np.cumsum(breaks) - 1
    distance = begin - begin[breaks][run]
    slot = distance // (extent_nbytes - CHUNK - GAP)
    breaks[1:] |= (run[1:] == run[:-1]) & (slot[1:] != slot[:-1])
    return np.flatnonzero(breaks)
