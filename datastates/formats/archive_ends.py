"""Reads both ends of archives that lie one after another in a file, with few reads. Checkpoints of DCP have such."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datastates.formats.archives import Read
from datastates.planning.wanted import GAP

_END_NBYTES = 1024
"""Bytes at each end of an archive. In torch's archives they hold everything but the tensor's elements."""
_WINDOW = 4 << 20
"""Most bytes in one read for the ends of several archives."""


def opened_ends(read: Read, places: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Read]]:
    """For each archive, yield its place and a function that reads from it; both ends of the archive are in memory.

    ``places``: offset and length of each archive in bytes, ascending. One read covers the end of an archive and the
    beginning of the next, or many small archives: reading over a gap costs less than another request, and brings the
    gap into the page cache.
    """
    wanted = []
    for place in places:
        begin, end = place[0], place[0] + place[1]
        wanted += [(begin, min(begin + _END_NBYTES, end), place), (max(end - _END_NBYTES, begin), end, place)]
    wanted.sort(key=lambda one: one[:2])
    heads: dict[tuple[int, int], bytes] = {}
    first = 0
    while first < len(wanted):
        low, high, _ = wanted[first]
        last = first + 1
        while last < len(wanted) and wanted[last][0] <= high + GAP and wanted[last][1] <= low + _WINDOW:
            high = max(high, wanted[last][1])
            last += 1
        window = read(low, high - low)
        for begin, end, place in wanted[first:last]:
            data = window[begin - low : end - low]
            if place in heads:
                yield place, _reader(read, place, heads.pop(place), data)
            else:
                heads[place] = data
        first = last


def _reader(read: Read, place: tuple[int, int], head: bytes, tail: bytes) -> Read:
    """A function that reads from an archive. It reads the file only for bytes between the archive's ends."""
    begin, nbytes = place
    tail_at = nbytes - len(tail)

    def read_archive(offset: int, length: int) -> bytes:
        if offset + length <= len(head):
            return head[offset : offset + length]
        if offset >= tail_at:
            return tail[offset - tail_at : offset - tail_at + length]
        return read(begin + offset, length)

    return read_archive
