"""Finds live memory that two reads would fill with different bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from datastates.reading.read_queue import ReadQueue, Source
from datastates.storage.stores import reader

COMPARED_AT_ONCE = 4 << 20
"""Bytes to read at a time from each of two places that are compared."""


def find(queues: Sequence[ReadQueue]) -> str | None:
    """Look for reads that would fill the same memory with different bytes.

    Such reads occur if live arrays share memory but the saved ones did not.

    Returns:
        Keys of the arrays whose bytes one of the reads brings; None if there are no such reads.
    """
    if not queues or _are_disjoint(queues):
        return None
    places = [_places(number, queue) for number, queue in enumerate(queues)]
    device, begin, length, number, offset = (np.concatenate(column) for column in zip(*places, strict=True))
    order = np.lexsort((begin, device))
    device, begin, length, number, offset = (c[order] for c in (device, begin, length, number, offset))
    end = begin + length
    # two ranges with the same distance between memory and file bring the same bytes
    origin = np.stack((number, (offset - begin).view(np.int64)))
    sources = [queue.source for queue in queues]
    furthest = 0
    for i in range(1, len(order)):
        if device[i] == device[furthest]:
            shared = int(min(end[i], end[furthest])) - int(begin[i])
            if shared > 0 and (origin[:, i] != origin[:, furthest]).any():
                source: Source = sources[number[i]]
                other = sources[number[furthest]], int(offset[furthest] + (begin[i] - begin[furthest]))
                if not _alike((source, int(offset[i])), other, shared):
                    return source.name_record(int(np.searchsorted(source.data_offset, offset[i], "right")) - 1)
            if end[i] <= end[furthest]:
                continue
        furthest = i
    return None


def _alike(first: tuple[Source, int], second: tuple[Source, int], nbytes: int) -> bool:
    """Whether the ``nbytes`` bytes at two places in files are equal. A place is a file and an offset in bytes."""
    (a, a_at), (b, b_at) = ((reader(source.path), offset) for source, offset in (first, second))
    pieces = ((at, min(COMPARED_AT_ONCE, nbytes - at)) for at in range(0, nbytes, COMPARED_AT_ONCE))
    return all(a(a_at + at, length) == b(b_at + at, length) for at, length in pieces)


def _are_disjoint(queues: Sequence[ReadQueue]) -> bool:
    """Whether no two ranges of the queues fill the same memory."""
    device, begin, end = map(np.concatenate, zip(*(queue.filled() for queue in queues), strict=True))
    order = np.lexsort((begin, device))
    device, begin, end = device[order], begin[order], end[order]
    return bool((end[:-1] <= begin[1:])[device[:-1] == device[1:]].all())


def _places(number: int, queue: ReadQueue) -> Iterator[Any]:
    """Columns of all stretches of a queue's ranges: device, address, length, the queue's number, file offset."""
    dest, ranges = queue.ranges()
    which, runs = ranges.stretches()
    pointer, device, _ = queue.memory
    dest = dest[which]
    yield device[dest]
    yield pointer[dest] + runs.dest.astype(np.uint64)
    yield runs.length.astype(np.uint64)
    yield np.full(len(dest), number)
    yield runs.source.astype(np.uint64)
