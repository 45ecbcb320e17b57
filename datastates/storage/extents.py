"""Where the bytes of files lie on a disk, by which files that share bytes are found. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """A stretch of a file that lies in one piece on a disk, in bytes.

    Attributes:
        disk: The disk, and the offset there of the file's first byte, had the whole file been in one piece.
        begin: The offset of its first byte in the file.
        end: One past its last byte in the file.
        is_shared: Whether the file system says that another file has it, too.
    """

    disk: tuple[int, int]
    begin: int
    end: int
    is_shared: bool


def shared_nbytes(file: Sequence[Extent], others: Iterable[Sequence[Extent]]) -> int:
    """Bytes of a file that some other file has, too, at the same offset and in the same place on the disk."""
    union: dict[tuple[int, int], list[list[int]]] = {}
    for disk, begin, end, _ in sorted(extent for other in others for extent in other):
        ranges = union.setdefault(disk, [])
        if ranges and begin <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([begin, end])
    return sum(_overlap(extent, union.get(extent.disk, [])) for extent in file)


def _overlap(extent: Extent, ranges: list[list[int]]) -> int:
    """Bytes of an extent that lie in one of some ranges, which ascend and do not touch."""
    total = 0
    for i in range(max(0, bisect_right(ranges, [extent.begin]) - 1), len(ranges)):
        begin, end = ranges[i]
        if begin >= extent.end:
            break
        total += max(0, min(end, extent.end) - max(begin, extent.begin))
    return total
