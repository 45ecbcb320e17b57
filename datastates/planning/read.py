"""Planning a restore: turns wanted ranges of a file into reads. Pure functions: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from datastates._base.columns import I32, I64, U8, U64, Bools, as_u64
from datastates._base.sizes import CHUNK
from datastates.planning.plans import Chunks, ReadPlan
from datastates.planning.wanted import GAP, Wanted, bytes_between, simplified
from datastates.state.runs import Runs, pairs

WASTE = 32
"""Number of wanted bytes for which one unwanted byte may be read. With the whole pages that direct I/O reads, and the
frames between large records, less than 1.05 bytes are read for each wanted byte."""


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """The bytes of a file to read, ascending. A segment is a whole chunk, which is verified, or a part of a chunk.

    Attributes:
        runs: The segments in bytes; their sources are file offsets. Bytes between the stretches of a run are not read.
        chunk: Number of the chunk that each segment lies in.
        verified: Whether each segment is a whole chunk that is verified.
    """

    runs: Runs
    chunk: I64
    verified: Bools

    @property
    def begin(self) -> I64:
        return self.runs.source

    @property
    def end(self) -> I64:
        return self.runs.end


def plan_chunks(data_offset: U64, nbytes: U64, crcs: np.ndarray) -> Chunks:
    """Make the chunks of a file's records.

    Args:
        data_offset: File offset of each record's data, ascending.
        nbytes: Length of each record in bytes.
        crcs: CRC-32 of each chunk, in file order.
    """
    lengths = nbytes.astype(np.int64)
    record, ordinal = pairs(0, -(-lengths // CHUNK))
    offset = data_offset.astype(np.int64)[record] + ordinal * CHUNK
    length = np.minimum(CHUNK, lengths[record] - ordinal * CHUNK)
    return Chunks(record.astype(np.int32), as_u64(offset), as_u64(length), np.ascontiguousarray(crcs, dtype=np.uint32))


def plan_read(
    wanted: Runs,
    dest: I32,
    dest_nbytes: U64,
    in_place: U8,
    whole: U8,
    chunks: Chunks,
    extent_nbytes: int,
    spare_nbytes: int = 0,
) -> ReadPlan:
    """Plan the reading of file ranges into destinations, and verify chunks where that costs few unwanted bytes.

    A chunk can only be verified if all of it is read. The plan therefore has a budget of unwanted bytes: one byte
    for :data:`WASTE` wanted ones, but at least ``spare_nbytes``. If the budget suffices, every chunk with a wanted byte
    is read as a whole and verified. If not, the chunks with the largest wanted share are verified. Of the others only
    the wanted bytes are read, and the plan counts them as unverified. The rest of the budget is used to read over gaps
    of up to :data:`GAP`, shortest first. Frames between consecutive chunks that are read whole are always read over,
    because a file of many small records consists largely of frames. Frames count against the budget.

    Narrow gaps between the rows of a part of a matrix do not count against the budget. Such a part is therefore read in
    whole chunks and verified. A gap is narrow if it is shorter than a page, which storage reads in any case, or no
    longer than the stretches beside it. An extent is shared if more than one byte in :data:`WASTE` lies in narrow gaps.
    Shared extents are read through the page cache: storage then reads them once for all ranks of a host.

    Of chunks without checksums only the wanted bytes and narrow gaps are read. The budget for other gaps is then the
    number of wanted bytes, because many short reads cost more than the bytes between them.

    A large record that can be read straight into its destination has extents of its own. Small stretches share an
    extent, even with gaps between them that are not read. The rows of a part of a matrix stay one range with a stride.

    Args:
        wanted: The wanted ranges in bytes. Sources are file offsets, dests are offsets in a destination. Each range
            lies within one record. Ranges may overlap.
        dest: Number of the destination that each range goes to.
        dest_nbytes: Length of each destination in bytes.
        in_place: For each destination, 1 if the storage can be read straight into it.
        whole: For each destination, 1 if all of its chunks that have checksums must be verified, at any cost.
        chunks: The file's chunks.
        extent_nbytes: Longest extent in bytes; more than a chunk and a gap.
        spare_nbytes: Unwanted bytes that may be read in any case, so that a small state is verified completely.
    """
    dest, runs = simplified(dest, wanted)
    ranges = Wanted.of(runs, chunks)
    segments, left = _read_segments(ranges, whole[dest], chunks, spare_nbytes)
    unverified = segments.chunk[~segments.verified]
    loose = np.searchsorted(unverified, ranges.first) < np.searchsorted(unverified, ranges.last)
    segments, left = _filled(segments, left)
    bridged = _bridges(segments, ranges, left)
    straight = ranges.coverage(in_place[dest].astype(np.int64)) > 0
    record = chunks.record[segments.chunk]
    starts = _extent_starts(segments, record, straight[segments.chunk], bridged, extent_nbytes)
    extents = segments.begin[starts], segments.end[_lasts(starts, len(record))]
    begins = np.append(True, ~bridged)[: len(record)]
    begins[starts] = True
    spans = np.flatnonzero(begins)
    span, span_end = segments.runs[spans], segments.end[_lasts(spans, len(record))]
    span_length = np.where(span.count > 1, span.length, span_end - span.source)
    checks = np.flatnonzero(segments.verified)
    within = extents[0][np.searchsorted(starts, np.arange(len(record)), side="right") - 1]
    which, extent, piece = _pieces(ranges, *extents)
    needed = bytes_between(ranges.union, *extents)
    between = bytes_between(ranges.fetched, *extents) - needed
    extent_check = np.searchsorted(checks, np.append(starts, len(record)))
    verified = np.append(0, np.cumsum(bytes_between(ranges.union, segments.begin[checks], segments.end[checks])))
    return ReadPlan(
        extent_offset=as_u64(extents[0]),
        extent_length=as_u64(extents[1] - extents[0]),
        extent_shared=(between * WASTE > extents[1] - extents[0]).astype(np.uint8),
        extent_span=as_u64(np.searchsorted(spans, np.append(starts, len(record)))),
        span_offset=as_u64(span.source - within[spans]),
        span_length=as_u64(span_length),
        span_count=as_u64(span.count),
        span_step=as_u64(np.where(span.count > 1, span.source_step, span_length)),
        extent_piece=as_u64(np.searchsorted(extent, np.arange(len(starts) + 1))),
        piece_dest=np.ascontiguousarray(dest[which], dtype=np.int32),
        piece_dest_offset=as_u64(piece.dest),
        piece_extent_offset=as_u64(piece.source - extents[0][extent]),
        piece_length=as_u64(piece.length),
        piece_count=as_u64(piece.count),
        piece_extent_step=as_u64(piece.source_step),
        piece_dest_step=as_u64(piece.dest_step),
        extent_check=as_u64(extent_check),
        check_offset=as_u64((segments.begin - within)[checks]),
        check_length=as_u64(segments.runs.length[checks]),
        check_crc=np.ascontiguousarray(chunks.crc[segments.chunk[checks]]),
        check_record=np.ascontiguousarray(record[checks], dtype=np.int32),
        extent_needed=as_u64(needed),
        extent_between=as_u64(between),
        extent_unverified=as_u64(needed - np.diff(verified[extent_check])),
        dest_nbytes=as_u64(dest_nbytes),
        unverified_dest=np.flatnonzero(np.bincount(dest[loose])).astype(np.int32),
    )


def _read_segments(ranges: Wanted, whole: U8, chunks: Chunks, spare_nbytes: int) -> tuple[_Segments, int]:
    """Choose the bytes to read and the chunks to verify.

    Args:
        ranges: The wanted ranges.
        whole: For each range, 1 if its chunks must be verified at any cost.
        chunks: The file's chunks.
        spare_nbytes: Unwanted bytes that may be read in any case.

    Returns:
        The segments to read, and the number of unwanted bytes that may still be read.
    """
    wanted = np.flatnonzero(ranges.coverage() > 0)
    begin, end = ranges.chunk_begin[wanted], ranges.chunk_end[wanted]
    every = _Segments(Runs.single(begin, begin, end - begin), wanted, np.full(len(wanted), chunks.checked))
    if not chunks.checked:
        return _loosened(ranges.fetched, every), ranges.needed_nbytes
    gap = begin[1:] - end[:-1]
    frames = int(gap[(np.diff(wanted) == 1) & (gap <= GAP)].sum())
    left = max(ranges.needed_nbytes // WASTE, spare_nbytes) - frames
    wasted = int((end - begin).sum()) - ranges.needed_nbytes - ranges.shared_nbytes
    if wasted <= left or wasted <= 0:
        return every, left - wasted
    must = ranges.coverage(whole.astype(np.int64))[wanted] > 0
    verified, wasted = _choose(end - begin, bytes_between(ranges.fetched, begin, end), must, left)
    return _loosened(ranges.fetched, replace(every, verified=verified)), left - wasted


def _lasts(starts: I64, count: int) -> I64:
    """The last number of each group of consecutive numbers below ``count``, given the first number of each group."""
    return np.append(starts[1:] - 1, count - 1)[: len(starts)]


def _pieces(ranges: Wanted, begin: I64, end: I64) -> tuple[I64, I64, Runs]:
    """Cut the ranges by extents, as :func:`_cut` does, and order the parts by extent."""
    which, extent, piece = _cut(ranges.runs, begin, end)
    order = np.lexsort((piece.source, extent))
    return which[order], extent[order], piece[order]


def _cut(runs: Runs, begin: I64, end: I64) -> tuple[I64, I64, Runs]:
    """Cut runs by ascending ranges of the source, from ``begin`` to before ``end``.

    Returns:
        For each part: the number of its run, the number of its range, and the part itself.
    """
    which, number = pairs(
        np.searchsorted(end, runs.source, side="right"), np.searchsorted(begin, runs.end, side="left")
    )
    of, part = runs[which].within(begin[number], end[number])
    return which[of], number[of], part


def _choose(nbytes: np.ndarray, wanted: np.ndarray, must: np.ndarray, left: int) -> tuple[np.ndarray, int]:
    """Choose the chunks to verify with a budget of ``left`` unwanted bytes.

    Args:
        nbytes: Length of each chunk.
        wanted: Number of wanted bytes of each chunk.
        must: Whether each chunk must be verified at any cost.
        left: The budget in bytes.

    Returns:
        Whether each chunk is verified, and the number of unwanted bytes that are read for it.
    """
    wasted = nbytes - wanted
    verified = must | (wasted == 0)
    spent = int(wasted[verified].sum())
    others = np.flatnonzero(~verified)
    others = others[np.argsort(wasted[others] / nbytes[others], kind="stable")]
    verified[others[spent + np.cumsum(wasted[others]) <= left]] = True
    return verified, int(wasted[verified].sum())


def _loosened(wanted: Runs, every: _Segments) -> _Segments:
    """Replace each segment that is not verified by the wanted bytes in it."""
    kept, loose = every.verified, np.flatnonzero(~every.verified)
    _, number, parts = _cut(wanted, every.begin[loose], every.end[loose])
    runs = Runs.joined([every.runs[kept], parts])
    order = np.argsort(runs.source, kind="stable")
    numbers = np.append(every.chunk[kept], every.chunk[loose[number]])
    return _Segments(runs[order], numbers[order], (np.arange(len(order)) < kept.sum())[order])


def _filled(segments: _Segments, left: int) -> tuple[_Segments, int]:
    """Read over the gaps of segments, shortest first, up to ``left`` bytes; also returns how many bytes remain."""
    runs = segments.runs
    gapped = np.flatnonzero(runs.has_gaps)
    if not len(gapped):
        return segments, left
    gapped = gapped[np.argsort((runs.source_step - runs.length)[gapped], kind="stable")]
    cost = np.cumsum(((runs.source_step - runs.length) * (runs.count - 1))[gapped])
    filled = np.zeros(len(runs), bool)
    filled[gapped[cost <= left]] = True
    single = Runs.single(runs.source, runs.dest, runs.end - runs.source)
    columns = (np.where(filled, getattr(single, f.name), getattr(runs, f.name)) for f in fields(Runs))
    return replace(segments, runs=Runs(*columns)), left - int(cost[cost <= left].max(initial=0))


def _bridges(segments: _Segments, ranges: Wanted, left: int) -> Bools:
    """Mark the gaps between segments to read over: all frames, then the shortest gaps up to ``left`` bytes in total.

    A frame is the gap between two consecutive chunks that are both read whole. The gaps beside a segment that has gaps
    itself are not read over.
    """
    begin, end, chunk = segments.begin, segments.end, segments.chunk
    single = segments.runs.count == 1
    is_whole = single & (begin == ranges.chunk_begin[chunk]) & (end == ranges.chunk_end[chunk])
    gap = begin[1:] - end[:-1]
    short = (gap <= GAP) & single[1:] & single[:-1]
    frame = is_whole[1:] & is_whole[:-1] & (np.diff(chunk) == 1)
    bridged = short & (frame | (gap == 0))
    more = np.flatnonzero(short & ~bridged)
    more = more[np.argsort(gap[more], kind="stable")]
    bridged[more[np.cumsum(gap[more]) <= left]] = True
    return np.asarray(bridged)


def _extent_starts(segments: _Segments, record: I32, in_place: Bools, bridged: Bools, extent_nbytes: int) -> I64:
    """Numbers of the segments that begin a new extent.

    Args:
        segments: The bytes to read.
        record: Number of each segment's record.
        in_place: For each segment, whether it is read straight into its destination.
        bridged: For each gap between two segments, whether it is read over.
        extent_nbytes: Longest extent in bytes.
    """
    begin, nbytes = segments.begin, segments.runs.size
    if not len(begin):
        return np.zeros(0, np.int64)
    size = np.zeros(int(record.max()) + 1, np.int64)
    np.add.at(size, record, nbytes)
    alone = in_place & (size[record] > CHUNK)
    new_record = np.append(True, record[1:] != record[:-1])
    breaks = new_record & (alone | np.append(False, alone[:-1]))
    # a gap that is not read over begins a new extent, except between two small stretches
    span = np.cumsum(np.append(True, ~bridged)) - 1
    small = np.bincount(span, np.where(segments.runs.count > 1, 0, nbytes)) < GAP
    gap = begin[1:] - segments.end[:-1]
    breaks |= np.append(True, (gap > GAP) | (~bridged & ~(small[span[1:]] & small[span[:-1]])))
    # cut where the distance from the run's begin crosses a multiple of the longest extent less a chunk and a gap
    run = np.cumsum(breaks) - 1
    distance = begin - begin[breaks][run]
    slot = distance // (extent_nbytes - CHUNK - GAP)
    breaks[1:] |= (run[1:] == run[:-1]) & (slot[1:] != slot[:-1])
    return np.flatnonzero(breaks)
