"""The queue of one file's reads: which ranges to read, and their destinations. Reads are planned from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from datastates._base.columns import I32, I64, U64, Bools
from datastates._base.sizes import PAGE
from datastates.executor.executor import Columns, columns
from datastates.planning.plans import Chunks, ReadPlan
from datastates.planning.several import FileRanges
from datastates.state.runs import Runs
from datastates.state.shards import HOST, Buffer
from datastates.storage import store_of
from datastates.storage.location import Location


class Source(Protocol):
    """A file of records: a :class:`~datastates.container.file.Container`, or a file that another package wrote."""

    @property
    def path(self) -> Location:
        """The path of the file."""

    @property
    def nbytes(self) -> int:
        """The length of the file in bytes."""

    @property
    def data_offset(self) -> U64:
        """File offset of each record's data, ascending."""

    def name_record(self, record: int) -> str:
        """The keys of arrays that lie in a record, for an error message."""

    def chunks(self, first: int, last: int) -> Chunks:
        """The chunks of the records from ``first`` to before ``last``."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Ranges of a file and their destinations, one column entry for each. Offsets and lengths are in bytes.

    Attributes:
        offset, nbytes: File offset and length of each range.
        pointer, device, stream: The destination of each range, as in :class:`~datastates.state.shards.Buffer`.
        whole: Whether each range is a whole array, which is always verified.
        key: The full key of the array that each range belongs to. A whole array of a file with checksums needs none.
    """

    offset: U64
    nbytes: U64
    pointer: U64
    device: I32
    stream: U64
    whole: Bools
    key: np.ndarray[Any, np.dtype[np.object_]]

    @staticmethod
    def joined(parts: Sequence[Ranges]) -> Ranges:
        """Join one or more objects. A range is dropped if another one brings the same bytes to the same destination.

        Such duplicates come from tied tensors.
        """
        all_ = [np.concatenate([getattr(p, c) for p in parts]) for c in Ranges.__slots__]
        order = np.lexsort((~all_[5], *all_[:4]))
        ordered = [c[order] for c in all_[:4]]
        again = np.logical_and.reduce([c[1:] == c[:-1] for c in ordered])
        if again.any():
            kept = np.sort(order[np.append(True, ~again)])
            all_ = [c[kept] for c in all_]
        return Ranges(*all_)


_ROW = np.dtype(
    [
        *((name, np.uint64) for name in ("offset", "nbytes", "pointer")),
        *(("device", np.int32), ("stream", np.uint64), ("whole", bool), ("key", object)),
    ]
)
"""One row of :class:`Ranges`, with the types of its columns."""


@dataclass(slots=True, eq=False)
class ReadQueue:
    """The ranges of one file to read, and their destinations. Offsets and lengths are in bytes.

    Destinations are numbered: first those with one range, then those with several ranges.

    Attributes:
        source: The file.
        many: Ranges with a destination of their own, in columns.
        rows: More ranges with a destination of their own, one by one, as rows of :class:`Ranges`.
        owners: Objects that keep the memory of all these destinations alive.
        runs: Destinations with several ranges: the full key of the array, the destination, and the ranges.
    """

    source: Source
    many: list[Ranges] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)
    runs: list[tuple[str, Buffer, Runs]] = field(default_factory=list)

    def add(self, key: str, offset: int, place: Buffer, *, whole: bool) -> None:
        """Queue one range of the file.

        Args:
            key: The full key of the array; empty if the range is for no array.
            offset: File offset of the range.
            place: The destination. The range has as many bytes.
            whole: Whether to verify all chunks of the range at any cost.
        """
        self.rows.append((offset, place.nbytes, place.pointer, place.device, place.stream, whole, key))
        self.owners.append(place)

    def add_runs(self, key: str, place: Buffer, runs: Runs) -> None:
        """Queue ranges of the file for one destination.

        Args:
            key: The full key of the array.
            place: The destination.
            runs: The ranges in bytes: their sources are file offsets, their dests are offsets in the destination.
        """
        if len(runs):
            self.runs.append((key, place, runs))

    def _single(self) -> Ranges:
        """All ranges with a destination of their own, in columns."""
        if self.rows or len(self.many) != 1:
            rows = np.array(self.rows, _ROW)
            self.many = [Ranges.joined([*self.many, Ranges(*(rows[name] for name in Ranges.__slots__))])]
            self.rows = []
        return self.many[0]

    @property
    def is_empty(self) -> bool:
        """Whether no range is queued."""
        return not self.runs and not len(self._single().offset)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the reads of the file fill."""
        return int(self._single().nbytes.sum()) + sum(int(runs.size.sum()) for *_, runs in self.runs)

    @property
    def memory(self) -> Columns:
        """Address, device and stream of each destination."""
        single, others = self._single(), columns([place for _, place, _ in self.runs])
        return (
            np.append(single.pointer, others[0]),
            np.append(single.device, others[1]),
            np.append(single.stream, others[2]),
        )

    def ranges(self) -> tuple[I64, Runs]:
        """All non-empty ranges in bytes, from file offsets to offsets in destinations, and the destination of each."""
        single = self._single()
        count = len(single.offset)
        offset, length = single.offset.astype(np.int64), single.nbytes.astype(np.int64)
        every = Runs.joined([Runs.single(offset, np.zeros(count, np.int64), length), *(runs for *_, runs in self.runs)])
        several = (np.full(len(runs), count + number) for number, (*_, runs) in enumerate(self.runs))
        dest = np.concatenate((np.arange(count), *several))
        filled = every.size > 0
        return dest[filled], every[filled]

    def filled(self) -> tuple[I32, U64, U64]:
        """Device, first address and end of each stretch of memory that a range fills, with the gaps in a stretch."""
        dest, runs = self.ranges()
        pointer, device, _ = self.memory
        which, begin, end = runs.filled()
        to = dest[which]
        return device[to], pointer[to] + begin.astype(np.uint64), pointer[to] + end.astype(np.uint64)

    @property
    def wanted(self) -> FileRanges:
        """The ranges for the planner.

        A file may be read straight into host memory that begins on a page, as direct I/O needs it. Most tensors do
        not. Other stores fill any host memory.
        """
        single, (pointer, device, _) = self._single(), self.memory
        has_files = store_of(self.source.path).traits.has_files
        dest, wanted = self.ranges()
        record = np.searchsorted(self.source.data_offset, wanted.source.astype(np.uint64), side="right") - 1
        first, last = (int(record.min()), int(record.max()) + 1) if len(record) else (0, 0)
        return FileRanges(
            nbytes=self.source.nbytes,
            wanted=wanted,
            dest=dest.astype(np.int32),
            dest_nbytes=np.append(single.nbytes, np.array([place.nbytes for _, place, _ in self.runs], np.uint64)),
            in_place=((device == HOST) & ((pointer % np.uint64(PAGE) == 0) | (not has_files))).astype(np.uint8),
            whole=np.append(single.whole, np.zeros(len(self.runs), bool)).astype(np.uint8),
            chunks=self.source.chunks(first, last),
        )

    def unverified(self, plan: ReadPlan) -> set[str]:
        """The full keys of arrays that the plan reads, wholly or in part, without verifying the bytes."""
        keys = np.append(self._single().key, np.array([key for key, *_ in self.runs], object))
        return set(keys[plan.unverified_dest].tolist())
