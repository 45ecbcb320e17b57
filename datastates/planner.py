"""Pure planning: from the sizes of shards to the extents of a file, and back. No I/O, no clock, no framework."""

from __future__ import annotations

import itertools

import numpy as np

from datastates.plan import (
    CHUNK,
    DESCRIPTOR,
    DESCRIPTOR_CRC,
    I32,
    LARGE_RECORD,
    PAGE,
    SMALL,
    U8,
    U32,
    U64,
    Chunks,
    ReadPlan,
    WritePlan,
)

GAP = 64 * 1024
"""Bytes between two wanted ranges that are cheaper to read than to skip."""


def _u64(values: object) -> U64:
    return np.ascontiguousarray(values, dtype=np.uint64)


def plan_write(source_nbytes: U64, eager: U8, header_nbytes: U64, block_nbytes: int) -> WritePlan:
    """Lay records out in a file and cut the file into extents.

    Eager sources come first, so that ``snapshot()`` captures one prefix of the file; then the largest first, so that
    the copy engine is busy at once and the small ones share the last extents. Large records begin on a page.

    Args:
        source_nbytes: Length of each source in bytes.
        eager: 1 for each source that must be captured inside ``snapshot()``.
        header_nbytes: Length of the shortest local header of the first, second, … record of the file; headers are
            padded up to the data's alignment.
        block_nbytes: The longest extent in bytes, a multiple of :data:`~datastates.plan.PAGE`.
    """
    sizes = source_nbytes.astype(np.int64)
    large = sizes >= LARGE_RECORD
    order = np.lexsort((-sizes, eager == 0))
    sizes, large = sizes[order], large[order]
    data_offset = _place(sizes, np.where(large, PAGE, SMALL), header_nbytes.astype(np.int64) + DESCRIPTOR)
    descriptor = data_offset + sizes
    header_offset = np.concatenate(([0], descriptor[:-1] + DESCRIPTOR)) if len(sizes) else data_offset
    end = int(descriptor[-1]) + DESCRIPTOR if len(sizes) else 0

    # the file is literal, data, literal, data, …, literal: a literal is a descriptor and the next record's header
    literal_offset = np.concatenate(([0], descriptor)) if len(sizes) else descriptor
    literal_length = np.concatenate((data_offset, [end])) - literal_offset if len(sizes) else descriptor
    starts = np.empty(2 * len(sizes) + (1 if len(sizes) else 0), np.int64)
    starts[0::2], starts[1::2] = literal_offset, data_offset
    lengths = np.empty_like(starts)
    lengths[0::2], lengths[1::2] = literal_length, sizes
    segment_source = np.full(len(starts), -1, np.int64)
    segment_source[1::2] = order
    base = np.zeros_like(starts)  # where a segment's first byte is in its source or in the literal
    base[0::2] = np.cumsum(literal_length) - literal_length
    filled = lengths > 0
    starts, segment_source, base = starts[filled], segment_source[filled], base[filled]

    cuts = _cuts(end, descriptor + DESCRIPTOR_CRC, block_nbytes)
    # a piece is a segment, or what is left of it between two cuts: most cuts fall inside of one
    before = np.searchsorted(starts, cuts[:-1])
    inside = np.flatnonzero(np.append(starts, end)[before] != cuts[:-1])
    piece_start = np.insert(starts, before[inside], cuts[:-1][inside])
    segment = np.insert(np.arange(len(starts)), before[inside], before[inside] - 1)
    extent_piece = np.searchsorted(piece_start, cuts)
    extent_begin = np.repeat(cuts[:-1], np.diff(extent_piece))
    patch = descriptor + DESCRIPTOR_CRC
    patch_extent = np.repeat(np.arange(len(cuts) - 1), np.diff(np.searchsorted(patch, cuts)))
    return WritePlan(
        order=order,
        source_nbytes=_u64(source_nbytes),
        eager=np.ascontiguousarray(eager, dtype=np.uint8),
        header_offset=_u64(header_offset),
        data_offset=_u64(data_offset),
        end=end,
        extent_offset=_u64(cuts[:-1]),
        extent_length=_u64(np.diff(cuts)),
        extent_piece=_u64(extent_piece),
        piece_source=segment_source[segment].astype(np.int32),
        piece_source_offset=_u64(base[segment] + piece_start - starts[segment]),
        piece_extent_offset=_u64(piece_start - extent_begin),
        piece_length=_u64(np.diff(piece_start, append=end)),
        patch_extent=_u64(patch_extent),
        patch_offset=_u64(patch - cuts[patch_extent]),
        patch_source=order.astype(np.int32),
        literal_offset=_u64(literal_offset),
        literal_length=_u64(literal_length),
    )


def _place(sizes: np.ndarray, alignment: np.ndarray, overhead: np.ndarray) -> np.ndarray:
    """Offset of each record's data: after the previous record's data, a descriptor and its own header, aligned.

    Within a run of equal alignment every offset is a multiple of it, so the run is one cumulative sum.
    """
    offsets = np.empty(len(sizes), np.int64)
    position = -DESCRIPTOR  # no descriptor stands before the first header
    bounds = [0, *(np.flatnonzero(np.diff(alignment)) + 1).tolist(), len(sizes)] if len(sizes) else []
    for first, last in itertools.pairwise(bounds):
        step = int(alignment[first])
        offsets[first] = -(-(position + int(overhead[first])) // step) * step
        strides = sizes[first : last - 1] + overhead[first + 1 : last]
        offsets[first + 1 : last] = offsets[first] + np.cumsum(-(-strides // step) * step)
        position = int(offsets[last - 1] + sizes[last - 1])
    return offsets


def _cuts(end: int, checksums: np.ndarray, block_nbytes: int) -> np.ndarray:
    """Page-aligned places to cut ``[0, end)`` into extents, none of them inside a checksum field of four bytes."""
    cuts = [0]
    while end - cuts[-1] > block_nbytes:
        cut = cuts[-1] + block_nbytes
        while True:
            nearest = int(np.searchsorted(checksums, cut))  # the first checksum at or after the cut
            if nearest == 0 or int(checksums[nearest - 1]) + 4 <= cut:
                break
            cut -= PAGE
        cuts.append(cut)
    return np.array([*cuts, end] if end else [0], np.int64)


def reorder_chunks(crcs: np.ndarray, plan: WritePlan) -> U32:
    """Chunk checksums of the sources end to end, as those of the records end to end."""
    counts = -(-plan.source_nbytes.astype(np.int64) // CHUNK)
    first = np.cumsum(counts) - counts
    ordered = counts[plan.order]
    within = np.arange(ordered.sum()) - np.repeat(np.cumsum(ordered) - ordered, ordered)
    return np.ascontiguousarray(crcs[np.repeat(first[plan.order], ordered) + within])


def plan_chunks(data_offset: U64, nbytes: U64, crcs: np.ndarray) -> Chunks:
    """The checksummed chunks of records that lie at ``data_offset`` in ascending order, from their stored CRCs."""
    lengths = nbytes.astype(np.int64)
    counts = -(-lengths // CHUNK)
    record = np.repeat(np.arange(len(lengths)), counts)
    ordinal = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = data_offset.astype(np.int64)[record] + ordinal * CHUNK
    length = np.minimum(CHUNK, lengths[record] - ordinal * CHUNK)
    return Chunks(record.astype(np.int32), _u64(offset), _u64(length), np.ascontiguousarray(crcs, dtype=np.uint32))


def plan_read(
    file_offset: U64,
    nbytes: U64,
    dest: I32,
    dest_offset: U64,
    dest_nbytes: U64,
    in_place: U8,
    chunks: Chunks,
    extent_nbytes: int,
) -> ReadPlan:
    """Plan the reading of file ranges into destinations, every byte verified.

    Ranges are widened to whole chunks, put in file order and coalesced across gaps of up to :data:`GAP`. A large
    record that goes to host memory has extents of its own, so that it can be read straight into place.

    Args:
        file_offset: Where each wanted range begins in the file; each lies within one record.
        nbytes: Its length.
        dest: The destination it goes to; several ranges may want the same bytes.
        dest_offset: Where in the destination it goes.
        dest_nbytes: Length of each destination.
        in_place: For each destination, 1 where the storage can be read straight into it.
        chunks: The container's chunks.
        extent_nbytes: The longest extent, at least one chunk and a gap.
    """
    order = np.argsort(file_offset, kind="stable")
    order = order[nbytes[order] > 0]
    begin = file_offset[order].astype(np.int64)
    end = begin + nbytes[order].astype(np.int64)
    chunk_begin = chunks.offset.astype(np.int64)
    chunk_end = chunk_begin + chunks.length.astype(np.int64)
    first = np.searchsorted(chunk_end, begin, side="right")
    last = np.searchsorted(chunk_begin, end, side="left")
    marks = np.zeros(len(chunk_begin) + 1, np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, last, -1)
    wanted = np.flatnonzero(np.cumsum(marks[:-1]) > 0)
    w_begin, w_end, w_record = chunk_begin[wanted], chunk_end[wanted], chunks.record[wanted]

    straight = np.zeros(len(chunk_begin) + 1, np.int64)
    np.add.at(straight, first, in_place[dest[order]].astype(np.int64))
    np.add.at(straight, last, -in_place[dest[order]].astype(np.int64))
    starts = _extent_starts(w_begin, w_end, w_record, np.cumsum(straight)[wanted] > 0, extent_nbytes)
    extent_begin = w_begin[starts]
    extent_end = w_end[np.append(starts[1:] - 1, len(wanted) - 1)] if len(wanted) else w_end
    extent_check = np.append(starts, len(wanted))
    check_extent = np.searchsorted(starts, np.arange(len(wanted)), side="right") - 1

    # a range is served by every extent that it meets
    low = np.searchsorted(extent_end, begin, side="right")
    high = np.searchsorted(extent_begin, end, side="left")
    counts = high - low
    which = np.repeat(np.arange(len(begin)), counts)
    extent = np.repeat(low, counts) + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_extent = np.argsort(extent, kind="stable")
    which, extent = which[by_extent], extent[by_extent]
    piece_begin = np.maximum(begin[which], extent_begin[extent])
    piece_end = np.minimum(end[which], extent_end[extent])
    return ReadPlan(
        extent_offset=_u64(extent_begin),
        extent_length=_u64(extent_end - extent_begin),
        extent_piece=_u64(np.searchsorted(extent, np.arange(len(extent_begin) + 1))),
        piece_dest=np.ascontiguousarray(dest[order][which], dtype=np.int32),
        piece_dest_offset=_u64(dest_offset[order][which].astype(np.int64) + piece_begin - begin[which]),
        piece_extent_offset=_u64(piece_begin - extent_begin[extent]),
        piece_length=_u64(piece_end - piece_begin),
        extent_check=_u64(extent_check),
        check_offset=_u64(w_begin - extent_begin[check_extent]),
        check_length=_u64(w_end - w_begin),
        check_crc=np.ascontiguousarray(chunks.crc[wanted]),
        check_record=np.ascontiguousarray(w_record, dtype=np.int32),
        dest_nbytes=_u64(dest_nbytes),
    )


def _extent_starts(
    begin: np.ndarray, end: np.ndarray, record: np.ndarray, in_place: np.ndarray, extent_nbytes: int
) -> np.ndarray:
    """Which of the wanted chunks begin a new extent."""
    if not len(begin):
        return np.zeros(0, np.int64)
    size = np.zeros(int(record.max()) + 1, np.int64)
    np.add.at(size, record, end - begin)
    alone = in_place & (size[record] > CHUNK)
    new_record = np.append(True, record[1:] != record[:-1])
    breaks = new_record & (alone | np.append(False, alone[:-1]))
    breaks |= np.append(True, begin[1:] - end[:-1] > GAP)
    # within a run, cut where the distance from its begin crosses a multiple of what fits with one more chunk and gap
    run = np.cumsum(breaks) - 1
    distance = begin - begin[breaks][run]
    slot = distance // (extent_nbytes - CHUNK - GAP)
    breaks[1:] |= (run[1:] == run[:-1]) & (slot[1:] != slot[:-1])
    return np.flatnonzero(breaks)
