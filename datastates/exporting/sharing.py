"""Reflinks: an exported file shares blocks with the checkpoint on file systems that can do so. Saves copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from datastates._base.sizes import PAGE
from datastates.container.table import Row
from datastates.reading.tensors import TensorFile
from datastates.state.strides import is_row_major
from datastates.storage import FileWriter
from datastates.storage.location import Location

SHORTEST = 1 << 20
"""Bytes from which on a stretch is shared. Sharing many short ones would make a file of many extents."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Whole pages that a file of the checkpoint and the exported file have in common.

    Attributes:
        path: The file of the checkpoint.
        offset: Offset in the checkpoint's file, in bytes.
        at: Offset in the exported file, in bytes.
        nbytes: Its length in bytes.
    """

    path: Location
    offset: int
    at: int
    nbytes: int


def stretch_of(source: TensorFile, row: Row, begin: int, end: int, at: int) -> Stretch | None:
    """The stretch of a tensor's range that can be shared; None if nothing can.

    Only files whose chunks have checksums are shared: a committed checkpoint does not change after it was verified.

    Args:
        source: A file of the checkpoint.
        row: A row of it with elements of the tensor.
        begin: First element of the range, in the flattened tensor.
        end: One past the last element of the range.
        at: Offset of the range in the exported file, in bytes.
    """
    first, last = row.part.bounds
    if not (source.checked and last - first == row.part.numel and is_row_major(row.shape, row.stride)):
        return None
    itemsize = row.dtype.itemsize
    low, high = max(begin, first), min(end, last)
    offset = int(source.data_offset[row.record]) + row.offset + (low - first) * itemsize
    at += (low - begin) * itemsize
    skipped = -at % PAGE
    nbytes = ((high - low) * itemsize - skipped) // PAGE * PAGE
    if (offset - at) % PAGE or nbytes < SHORTEST:
        return None
    return Stretch(source.path, offset + skipped, at + skipped, nbytes)


class Sharing:
    """Shares stretches with one exported file, until the store refuses."""

    def __init__(self, target: FileWriter) -> None:
        """Begin to share with the file ``target``."""
        self._target = target
        self._refused = False

    def share(self, stretches: Sequence[Stretch]) -> Iterator[tuple[int, int]]:
        """Share stretches with the file; yields the ranges of the file in bytes that are filled thereby, ascending."""
        for one in sorted(stretches, key=lambda one: one.at):
            self._refused = self._refused or not self._target.share(one.path, one.offset, one.nbytes, one.at)
            if self._refused:
                return
            yield one.at, one.at + one.nbytes
