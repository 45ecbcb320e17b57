"""The queue of one file's reads: which ranges to read, and their destinations. Reads are planned from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from datastates._base.columns import I32, I64, U64, Bools
from datastates.executor.executor import Columns, columns
from datastates.planning.plans import Chunks, ReadPlan
from datastates.planning.several import FileRanges
from datastates.state.runs import Runs
from datastates.state.shards import HOST, Buffer


class Source(Protocol):
    """A file of records: a :class:`~datastates.container.file.Container`, or a file that another package wrote."""

    @property
    def path(self) -> Path:
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
    """Ranges of a file and their destinations, one column entry for each. Offsets and lengths are bytes.

    Attributes:
        offset, nbytes: File offset and length of each.
        pointer, device, stream: The destination of each, as in :class:`~datastates.state.shards.Buffer`.
        whole: Whether each is a whole array, which is always verified.
        key: For each that is not, the full key of its array.
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
        """Join them. Duplicates, as of tied tensors, are dropped: the same bytes to the same destination."""
        if not parts:
            none = np.zeros(0, np.uint64)
            return Ranges(none, none, none, np.zeros(0, np.int32), none, np.zeros(0, bool), np.zeros(0, object))
        all_ = [np.concatenate([getattr(p, c) for p in parts]) for c in Ranges.__slots__]
        order = np.lexsort((~all_[5], *all_[:4]))
        ordered = [c[order] for c in all_[:4]]
        again = np.logical_and.reduce([c[1:] == c[:-1] for c in ordered])
        if again.any():
            kept = np.sort(order[np.append(True, ~again)])
            all_ = [c[kept] for c in all_]
        return Ranges(*all_)


@dataclass(slots=True, eq=False)
class ReadQueue:
    """The ranges of one file to read, and their destinations: first those of ``many``, then the buffers. In bytes.

    Attributes:
        source: The file.
        many: Many ranges at once, each with a destination of its own.
        owners: Objects that keep the memory of ``many`` alive.
        keys: For each buffer, the full key of its array; empty if it is for no array.
        buffers: The other destinations, each for one range or several.
        offsets, lengths: For each buffer, file offset and length of its range; 0 if its ranges are in ``runs``.
        whole: For each buffer, whether it gets a whole array, which is always verified.
        runs: Buffers with several ranges: the buffer's number, and the ranges.
        seen: The buffers of ``add`` so far, by place in the file and in memory.
    """

    source: Source
    many: list[Ranges] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    runs: list[tuple[int, Runs]] = field(default_factory=list)
    seen: set[tuple[object, ...]] = field(default_factory=set)

    def add(self, key: str, offset: int, place: Buffer, *, whole: bool) -> None:
        """Queue one range: from a file offset, as many bytes as ``place`` has. ``whole``: verify it at any cost."""
        same = (offset, place.nbytes, place.device, place.pointer)
        if same in self.seen:
            return  # tied tensors: the same bytes to the same memory
        self.seen.add(same)
        self.keys.append(key)
        self.buffers.append(place)
        self.offsets.append(offset)
        self.lengths.append(place.nbytes)
        self.whole.append(whole)

    def add_runs(self, key: str, place: Buffer, runs: Runs) -> None:
        """Queue ranges of the file for one destination.

        Args:
            key: The full key of the array.
            place: The destination.
            runs: The ranges in bytes: their sources are file offsets, their dests are offsets in the destination.
        """
        if len(runs):
            self.runs.append((len(self.buffers), runs))
            self.keys.append(key)
            self.buffers.append(place)
            self.offsets.append(0)
            self.lengths.append(0)
            self.whole.append(False)

    def _joined(self) -> Ranges:
        if len(self.many) != 1:
            self.many = [Ranges.joined(self.many)]
        return self.many[0]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued."""
        return not self.buffers and not len(self._joined().offset)

    @property
    def nbytes(self) -> int:
        """Bytes of memory to fill."""
        runs = sum(int(runs.size.sum()) for _, runs in self.runs)
        return int(self._joined().nbytes.sum()) + sum(self.lengths) + runs

    @property
    def memory(self) -> Columns:
        """Address, device and stream of each destination."""
        many, others = self._joined(), columns(self.buffers)
        return (
            np.append(many.pointer, others[0]),
            np.append(many.device, others[1]),
            np.append(many.stream, others[2]),
        )

    def ranges(self) -> tuple[I64, Runs]:
        """All non-empty ranges in bytes, from file offsets to offsets in destinations, and the destination of each."""
        many, count = self._joined(), len(self.buffers)
        first = len(many.offset)
        offset = np.concatenate((many.offset.astype(np.int64), np.array(self.offsets, np.int64)))
        length = np.concatenate((many.nbytes.astype(np.int64), np.array(self.lengths, np.int64)))
        single = Runs.single(offset, np.zeros(first + count, np.int64), length)
        dest = np.concatenate((np.arange(first + count), *(np.full(len(runs), first + d) for d, runs in self.runs)))
        every = Runs.joined([single, *(runs for _, runs in self.runs)])
        filled = every.size > 0
        return dest[filled], every[filled]

    def wanted(self) -> FileRanges:
        """What to read, for the planner."""
        many, (_, device, _) = self._joined(), self.memory
        dest, wanted = self.ranges()
        record = np.searchsorted(self.source.data_offset, wanted.source.astype(np.uint64), side="right") - 1
        first, last = (int(record.min()), int(record.max()) + 1) if len(record) else (0, 0)
        return FileRanges(
            nbytes=self.source.nbytes,
            wanted=wanted,
            dest=dest.astype(np.int32),
            dest_nbytes=np.append(many.nbytes, np.array([b.nbytes for b in self.buffers], np.uint64)),
            in_place=(device == HOST).astype(np.uint8),
            whole=np.append(many.whole, np.array(self.whole, bool)).astype(np.uint8),
            chunks=self.source.chunks(first, last),
        )

    def unverified(self, plan: ReadPlan) -> set[str]:
        """The keys of arrays of which the plan reads some bytes without verifying them."""
        keys = self._joined().key
        first = len(keys)
        return {keys[d] if d < first else self.keys[d - first] for d in plan.unverified_dest.tolist()}
