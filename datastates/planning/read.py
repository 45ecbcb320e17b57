"""Planning a restore: from wanted ranges of a file to reads. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from datastates._base.columns import I32, I64, U8, U64, as_u64
from datastates._base.sizes import CHUNK
from datastates.planning.plans import Chunks, ReadPlan
from datastates.state import parts

GAP = 64 * 1024
"""Bytes between two wanted ranges that are cheaper to read than to skip, where there is leave to."""
WASTE = 32
"""One byte that nobody wants may be read for so many that are wanted. With the whole pages that direct I/O reads, and
the frames between large records, it stays below 1.05 bytes for each wanted one."""


def plan_chunks(data_offset: U64, nbytes: U64, crcs: np.ndarray) -> Chunks:
    """The checksummed chunks of records that lie at ``data_offset`` in ascending order, from their stored CRCs."""
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
    """Plan the reading of file ranges into destinations, verified as far as that takes little more than is wanted.

    Every chunk that a wanted byte lies in is read as a whole and verified, and gaps of up to :data:`GAP` are read over,
    as long as no more than one byte for :data:`WASTE` wanted ones is read in vain. Beyond that, the chunks of which the
    largest part is wanted are verified, and of the others the wanted bytes alone are read, unverified: the plan says
    which. Only the frames between wanted records that stand next to each other are read over whatever they amount to: a
    file of many small records consists of them.

    Of chunks without checksums the wanted bytes alone are read, and gaps of as many bytes in all: half of the columns
    of a matrix are many stretches, and cost by their number.

    A large record that goes to host memory has extents of its own, so that it can be read straight into place. Small
    stretches with gaps between them that are not read over share an extent.

    Args:
        file_offset: Where each wanted range begins in the file; each lies within one record.
        nbytes: Its length.
        dest: The destination it goes to; several ranges may want the same bytes.
        dest_offset: Where in the destination it goes.
        dest_nbytes: Length of each destination.
        in_place: For each destination, 1 where the storage can be read straight into it.
        whole: For each destination, 1 where all that it gets must be verified, whatever that takes, if it can be.
        chunks: The file's chunks.
        extent_nbytes: The longest extent, at least one chunk and a gap.
        spare_nbytes: Bytes that may be read in vain in any case, so that little states are verified as a whole.
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

    # a range is served by every extent that it meets
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
    """The first extents of what :func:`plan_read` makes of a file that is wanted whole, without destinations.

    Args:
        chunks: The file's first chunks.
        count: How many extents at most.
        complete: Whether these are all the chunks that it has: else the last extent may be a longer one.
        in_place: Whether the storage can be read straight into all destinations.
        extent_nbytes: As there.
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
    """For each of ``n`` chunks, the weights of the ranges that meet it: those from ``first`` to before ``last``."""
    marks = np.zeros(n + 1, np.int64)
    np.add.at(marks, first, weight)
    np.add.at(marks, last, -weight)
    return np.cumsum(marks[:-1])


def _pairs(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each number of a row with each of the numbers from its ``low`` to before its ``high``, as two columns."""
    counts = high - low
    which = np.repeat(np.arange(len(low)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - low, counts)


def bytes_between(begin: I64, end: I64, low: I64, high: I64) -> I64:
    """How many bytes of disjoint stretches, given ascending, lie in each range from ``low`` to before ``high``."""
    before = np.cumsum(end - begin) - (end - begin)

    def below(position: I64) -> I64:
        at = np.searchsorted(begin, position, side="right") - 1
        return np.where(at < 0, 0, before[at] + np.minimum(position, end[at]) - begin[at])

    return below(high) - below(low)


def _choose(nbytes: np.ndarray, wanted: np.ndarray, must: np.ndarray, left: int) -> tuple[np.ndarray, int]:
    """Which chunks to verify when ``left`` bytes may be read in vain, and how many then are."""
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
    """What to read, in file order: the chunks to be verified, and what is wanted of the others.

    Chunks are given, and segments returned, as their begins, ends and the numbers of the chunks; with the segments,
    which of them are chunks to be verified.
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
    """Which gaps between segments to read over: frames, and as many more, the shortest first, as ``left`` allows.

    Frames lie between segments that are ``complete`` chunks; all those that are verified are.
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
    """Which of the segments begin a new extent."""
    if not len(begin):
        return np.zeros(0, np.int64)
    size = np.zeros(int(record.max()) + 1, np.int64)
    np.add.at(size, record, end - begin)
    alone = in_place & (size[record] > CHUNK)
    new_record = np.append(True, record[1:] != record[:-1])
    breaks = new_record & (alone | np.append(False, alone[:-1]))
    # a gap that is not read over parts two extents, but for those among small stretches
    span = np.cumsum(np.append(True, ~bridged)) - 1
    small = np.bincount(span, end - begin) < GAP
    gap = begin[1:] - end[:-1]
    breaks |= np.append(True, (gap > GAP) | (~bridged & ~(small[span[1:]] & small[span[:-1]])))
    # within a run, cut where the distance from its begin crosses a multiple of what fits with one more chunk and gap
    run = np.cumsum(breaks) - 1
    distance = begin - begin[breaks][run]
    slot = distance // (extent_nbytes - CHUNK - GAP)
    breaks[1:] |= (run[1:] == run[:-1]) & (slot[1:] != slot[:-1])
    return np.flatnonzero(breaks)
