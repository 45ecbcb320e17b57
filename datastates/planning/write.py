"""Planning a save: turns the sizes of buffers into offsets and extents of a file. Pure functions: no I/O, no clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from datastates._base.columns import I64, U8, U64, as_u64
from datastates._base.sizes import CHUNK, DESCRIPTOR, DESCRIPTOR_CRC, LARGE_RECORD, PAGE, SMALL
from datastates.planning.plans import WritePlan
from datastates.state.runs import pairs


def file_order(source_nbytes: U64, eager: U8) -> I64:
    """Order the sources of a snapshot in the file: for each record of the file, the number of its source.

    Eager sources come first, so that ``snapshot()`` captures a prefix of the file. Within eager and lazy sources the
    largest come first, so that the copy engine is busy at once and small sources share the last extents.
    """
    return np.lexsort((-source_nbytes.astype(np.int64), eager == 0))


def plan_write(
    source_nbytes: U64,
    eager: U8,
    header_nbytes: U64,
    block_nbytes: int,
    crc_places: Sequence[int] = (DESCRIPTOR_CRC,),
) -> WritePlan:
    """Lay records out in a file, in :func:`file_order`, and cut the file into extents. Large records begin on a page.

    Args:
        source_nbytes: Length of each source in bytes.
        eager: 1 for each source that must be captured inside ``snapshot()``.
        header_nbytes: Shortest length in bytes of each record's local header, in the file's order. Headers are padded
            up to the alignment of the data.
        block_nbytes: Longest extent in bytes, a multiple of :data:`~datastates._base.sizes.PAGE`.
        crc_places: Offsets from a record's descriptor at which its CRC-32 is filled in. Places at or after the end of
            the last descriptor are left out.
    """
    order = file_order(source_nbytes, eager)
    sizes = source_nbytes.astype(np.int64)[order]
    alignment = np.where(sizes >= LARGE_RECORD, PAGE, SMALL)
    data_offset = _place(sizes, alignment, header_nbytes.astype(np.int64) + DESCRIPTOR)
    end = int(data_offset[-1] + sizes[-1]) + DESCRIPTOR if len(sizes) else 0
    return _plan(order, source_nbytes, eager, data_offset, end, block_nbytes, DESCRIPTOR, crc_places)


def plan_dense_write(source_nbytes: U64, order: Sequence[int], header_nbytes: int, block_nbytes: int) -> WritePlan:
    """Lay lazy records out end to end behind one header, as in safetensors files, and cut the file into extents.

    Args:
        source_nbytes: Length of each source in bytes.
        order: For each record of the file, the number of its source.
        header_nbytes: Length of the header in bytes.
        block_nbytes: Longest extent in bytes, a multiple of :data:`~datastates._base.sizes.PAGE`.
    """
    eager = np.zeros(len(source_nbytes), np.uint8)
    numbers = np.array(order, np.int64)
    sizes = source_nbytes.astype(np.int64)[numbers]
    ends = header_nbytes + np.cumsum(sizes)
    end = int(ends[-1]) if len(ends) else header_nbytes
    return _plan(numbers, source_nbytes, eager, ends - sizes, end, block_nbytes, 0, ())


def _plan(
    order: I64,
    source_nbytes: U64,
    eager: U8,
    data_offset: I64,
    end: int,
    block_nbytes: int,
    descriptor_nbytes: int,
    crc_places: Sequence[int],
) -> WritePlan:
    """Cut a file into extents. Behind a record's data is its descriptor, then the next record's header."""
    sizes = source_nbytes.astype(np.int64)[order]
    descriptor = data_offset + sizes
    header_offset = np.concatenate(([0], descriptor + descriptor_nbytes))[: len(sizes)]

    # the file is literal, data, literal, data, …, literal; a literal is a descriptor and the next record's header
    literal_offset = np.concatenate(([0], descriptor))
    literal_length = np.concatenate((data_offset, [end])) - literal_offset
    starts = np.empty(2 * len(sizes) + 1, np.int64)
    starts[0::2], starts[1::2] = literal_offset, data_offset
    lengths = np.empty_like(starts)
    lengths[0::2], lengths[1::2] = literal_length, sizes
    segment_source = np.full(len(starts), -1, np.int64)
    segment_source[1::2] = order
    base = np.zeros_like(starts)  # offset of a segment's first byte in its source or in the literal
    base[0::2] = np.cumsum(literal_length) - literal_length
    filled = lengths > 0
    starts, segment_source, base = starts[filled], segment_source[filled], base[filled]

    patch = (descriptor[:, None] + np.array(crc_places, np.int64)).ravel()
    patch_source = np.repeat(order, len(crc_places))[patch < end]
    patch = patch[patch < end]
    cuts = cut_extents(end, patch, block_nbytes)
    # a piece is a segment, or a part of it between two cuts; most cuts fall inside a segment
    before = np.searchsorted(starts, cuts[:-1])
    inside = np.flatnonzero(np.append(starts, end)[before] != cuts[:-1])
    piece_start = np.insert(starts, before[inside], cuts[:-1][inside])
    segment = np.insert(np.arange(len(starts)), before[inside], before[inside] - 1)
    extent_piece = np.searchsorted(piece_start, cuts)
    extent_begin = np.repeat(cuts[:-1], np.diff(extent_piece))
    patch_extent = np.repeat(np.arange(len(cuts) - 1), np.diff(np.searchsorted(patch, cuts)))
    return WritePlan(
        order=order,
        source_nbytes=as_u64(source_nbytes),
        eager=np.ascontiguousarray(eager, dtype=np.uint8),
        header_offset=as_u64(header_offset),
        data_offset=as_u64(data_offset),
        end=end,
        extent_offset=as_u64(cuts[:-1]),
        extent_length=as_u64(np.diff(cuts)),
        extent_piece=as_u64(extent_piece),
        piece_source=segment_source[segment].astype(np.int32),
        piece_source_offset=as_u64(base[segment] + piece_start - starts[segment]),
        piece_extent_offset=as_u64(piece_start - extent_begin),
        piece_length=as_u64(np.diff(piece_start, append=end)),
        patch_extent=as_u64(patch_extent),
        patch_offset=as_u64(patch - cuts[patch_extent]),
        patch_source=patch_source.astype(np.int32),
        patch_after=np.zeros(len(patch), np.uint64),
    )


def _place(sizes: np.ndarray, alignment: np.ndarray, overhead: np.ndarray) -> np.ndarray:
    """File offset of each record's data: aligned, after the previous record's data and descriptor and its own header.

    Within a run of records of equal alignment all offsets are multiples of it, so one cumulative sum gives them.
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


def cut_extents(end: int, checksums: np.ndarray, block_nbytes: int) -> np.ndarray:
    """Page-aligned cuts of ``[0, end)`` into extents; no cut is inside a checksum field, which has four bytes."""
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


def chunk_order(plan: WritePlan) -> I64:
    """For each chunk in the order of the records, its number in the order of the sources."""
    counts = -(-plan.source_nbytes.astype(np.int64) // CHUNK)
    end = np.cumsum(counts)
    return pairs((end - counts)[plan.order], end[plan.order])[1]


def owners(parts: Sequence[tuple[str, int, tuple[int, ...]]]) -> list[int]:
    """Choose the rank that writes each part, so that the ranks of each set of replicas write about as many bytes.

    Each set of replicas is handled by itself, largest part first. A part goes to the rank with the fewest bytes so far,
    and at a tie to the lower rank. The result therefore depends neither on the order of ``parts`` nor on the parts of
    other sets. No rank of a set writes more than its fair share of the set's bytes plus one part.

    Ranks that describe a set's parts in the same way get the same result. If their descriptions differ (a key that only
    some of them have, or another size), several of them or none may write a part. The commit then finds two claims of
    one range or a gap in a tensor, and fails with its key.

    Args:
        parts: For each part its full key, its size in bytes, and the ranks that hold it.

    Returns:
        The writing rank of each part.

    Raises:
        ValueError: A part is held by no rank.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for i, (key, _, replicas) in enumerate(parts):
        if not replicas:
            raise ValueError(f"{key!r} is held by no rank")
        sets.setdefault(tuple(sorted(replicas)), []).append(i)
    result = [0] * len(parts)
    for ranks, members in sets.items():
        loads = [(0, rank) for rank in ranks]  # an ascending list is a heap
        for i in sorted(members, key=lambda i: (-parts[i][1], parts[i][0])):
            load, rank = loads[0]
            result[i] = rank
            heapq.heapreplace(loads, (load + parts[i][1], rank))
    return result
