"""What is to be read of one file, and where it goes: what a read is planned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from datastates._base.columns import I32, I64, U64
from datastates.executor.executor import Columns, columns
from datastates.planning import read
from datastates.planning.plans import Chunks, ReadPlan
from datastates.state.shards import HOST, Buffer


class Source(Protocol):
    """A file of records that can be read from: a :class:`Container`, or one that others wrote."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def nbytes(self) -> int:
        """Its length."""

    @property
    def data_offset(self) -> U64:
        """Where each record's data begins, ascending."""

    def name_record(self, record: int) -> str:
        """The keys that lie in a record, for an error about it."""

    def chunks(self, first: int, last: int) -> Chunks:
        """The chunks of the records from ``first`` to before ``last``."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Whole arrays of a container, and where their bytes go; lengths and offsets in bytes.

    Attributes:
        offset, nbytes: Where in the file each begins, and its length.
        pointer, device, stream: Where it goes, as :class:`~datastates.state.shards.Buffer` says it.
    """

    offset: U64
    nbytes: U64
    pointer: U64
    device: I32
    stream: U64

    @staticmethod
    def joined(parts: Sequence[Ranges]) -> Ranges:
        """All of them; what goes from one place to another twice, as tied tensors do, is there once."""
        if not parts:
            none = np.zeros(0, np.uint64)
            return Ranges(none, none, none, np.zeros(0, np.int32), none)
        all_ = [np.concatenate([getattr(p, c) for p in parts]) for c in Ranges.__slots__]
        order = np.lexsort((*all_[:2], *all_[2:4]))
        ordered = [c[order] for c in all_[:4]]
        again = np.logical_and.reduce([c[1:] == c[:-1] for c in ordered])
        if again.any():
            kept = np.sort(order[np.append(True, ~again)])
            all_ = [c[kept] for c in all_]
        return Ranges(*all_)


@dataclass(slots=True, eq=False)
class ReadQueue:
    """What is to be read of one file. Destinations are the whole arrays, then the buffers.

    Attributes:
        source: The file.
        whole_arrays: Arrays that are read as they are.
        owners: What keeps their memory alive.
        keys: For each buffer, the full key of what it gets, if it is an array.
        buffers: Memory that one range, or several, go to.
        offsets, lengths: Where in the file what fills a buffer begins, and its length; 0 where it is in ``runs``.
        whole: For each buffer, whether it gets a whole array, which is always verified.
        runs: Buffers that several ranges go to: number, and the ranges' offsets in the file, offsets in the buffer, and
            lengths.
        seen: Buffers that are queued, by place in the file and in memory.
    """

    source: Source
    whole_arrays: list[Ranges] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    runs: list[tuple[int, I64, I64, I64]] = field(default_factory=list)
    seen: set[tuple[object, ...]] = field(default_factory=set)

    def add(self, key: str, offset: int, place: Buffer, *, whole: bool) -> None:
        """Queue as many bytes as the memory has, from an offset of the file on."""
        same = (offset, place.nbytes, place.device, place.pointer)
        if same in self.seen:
            return  # tied tensors: the same bytes to the same memory
        self.seen.add(same)
        self.keys.append(key)
        self.buffers.append(place)
        self.offsets.append(offset)
        self.lengths.append(place.nbytes)
        self.whole.append(whole)

    def add_runs(self, key: str, place: Buffer, offset: I64, at: I64, length: I64) -> None:
        """Queue ranges of the file, each to its place in one memory; all in bytes."""
        if len(length) == 1:
            to = replace(place, pointer=place.pointer + int(at[0]), nbytes=int(length[0]))
            self.add(key, int(offset[0]), to, whole=False)
        elif len(length):
            self.runs.append((len(self.buffers), offset, at, length))
            self.keys.append(key)
            self.buffers.append(place)
            self.offsets.append(0)
            self.lengths.append(0)
            self.whole.append(False)

    def _joined(self) -> Ranges:
        if len(self.whole_arrays) > 1:
            self.whole_arrays = [Ranges.joined(self.whole_arrays)]
        return self.whole_arrays[0] if self.whole_arrays else Ranges.joined([])

    @property
    def nbytes(self) -> int:
        """Bytes that are to be filled."""
        runs = sum(int(length.sum()) for *_, length in self.runs)
        return int(self._joined().nbytes.sum()) + sum(self.lengths) + runs

    @property
    def memory(self) -> Columns:
        """Where the destinations are."""
        arrays, others = self._joined(), columns(self.buffers)
        return (
            np.append(arrays.pointer, others[0]),
            np.append(arrays.device, others[1]),
            np.append(arrays.stream, others[2]),
        )

    def ranges(self) -> tuple[I64, I64, I64, I64]:
        """All ranges that are not empty: destination, offset in the file, offset in the destination, length."""
        arrays, count = self._joined(), len(self.buffers)
        first = len(arrays.offset)
        offset = np.concatenate((arrays.offset.astype(np.int64), np.array(self.offsets, np.int64)))
        length = np.concatenate((arrays.nbytes.astype(np.int64), np.array(self.lengths, np.int64)))
        all_ = [(np.arange(first + count), offset, np.zeros(first + count, np.int64), length)]
        all_ += [(np.full(len(length), first + d), offset, at, length) for d, offset, at, length in self.runs]
        dest, offset, at, length = (np.concatenate(column) for column in zip(*all_, strict=True))
        filled = length > 0
        return dest[filled], offset[filled], at[filled], length[filled]

    def plan(self, extent_nbytes: int, spare_nbytes: int) -> ReadPlan:
        """How to read it; arguments as of :func:`~datastates.planning.read.plan_read`."""
        arrays, (_, device, _) = self._joined(), self.memory
        dest, offset, at, length = self.ranges()
        record = np.searchsorted(self.source.data_offset, offset.astype(np.uint64), side="right") - 1
        first, last = (int(record.min()), int(record.max()) + 1) if len(record) else (0, 0)
        return read.plan_read(
            file_offset=offset.astype(np.uint64),
            nbytes=length.astype(np.uint64),
            dest=dest.astype(np.int32),
            dest_offset=at.astype(np.uint64),
            dest_nbytes=np.append(arrays.nbytes, np.array([b.nbytes for b in self.buffers], np.uint64)),
            in_place=(device == HOST).astype(np.uint8),
            whole=np.append(np.ones(len(arrays.offset), np.uint8), np.array(self.whole, np.uint8)),
            chunks=self.source.chunks(first, last),
            extent_nbytes=extent_nbytes,
            spare_nbytes=spare_nbytes,
        )

    def unverified(self, plan: ReadPlan) -> set[str]:
        """The keys of which the plan reads some bytes unverified."""
        if not len(plan.unverified_offset):
            return set()
        dest, offset, _, length = self.ranges()
        begin = plan.unverified_offset.astype(np.int64)
        loose = read.bytes_between(begin, begin + plan.unverified_length.astype(np.int64), offset, offset + length)
        first = len(self._joined().offset)
        return {self.keys[d - first] for d in set(dest[loose > 0].tolist())}
