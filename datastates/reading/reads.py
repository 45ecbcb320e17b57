"""Reads arrays from files into live arrays, with the planner and the executor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates.container.rows import reference
from datastates.container.table import Row
from datastates.errors import DatastatesError
from datastates.executor.executor import Executor
from datastates.executor.jobs import ReadJob
from datastates.executor.timeline import Span
from datastates.planning.several import plan_several
from datastates.planning.wanted import GAP
from datastates.reading import overlaps
from datastates.reading.read_queue import Ranges, ReadQueue, Source
from datastates.state import arrays, parts, strides
from datastates.state import memory as array_memory
from datastates.state.parts import Block
from datastates.state.runs import Runs, spread
from datastates.state.shards import HOST, ArrayRef, Buffer, Shard
from datastates.state.strides import span
from datastates.storage.location import Location

SMALL_STATE = 1 << 20
"""A restore of fewer bytes may read as many unwanted bytes, so a small state is verified completely."""
SMALL_COPY = 64 * 1024
"""If the copies to a device have at least so many bytes on average, a part is copied there without a host copy."""
SMALL_ROW = 256
"""If rows have at least so many bytes on average, one copy of many rows reaches a device at full speed."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of the bytes that were read of all files.

    Attributes:
        needed_nbytes: Wanted bytes of the files; each is counted once.
        read_nbytes: Bytes that were read, as :meth:`datastates.executor.jobs.ReadJob.stats` counts them.
        shared_nbytes: Bytes among ``read_nbytes`` that lie between wanted rows of matrices. Storage reads them once for
            all ranks of a host.
        unverified_nbytes: Wanted bytes that were read without a checksum over them.
        unverified_keys: Full keys of the arrays with unverified bytes, sorted.
    """

    needed_nbytes: int
    read_nbytes: int
    shared_nbytes: int
    unverified_nbytes: int
    unverified_keys: tuple[str, ...]

    def __add__(self, other: Tally) -> Tally:
        """The sum of two tallies."""
        return Tally(
            self.needed_nbytes + other.needed_nbytes,
            self.read_nbytes + other.read_nbytes,
            self.shared_nbytes + other.shared_nbytes,
            self.unverified_nbytes + other.unverified_nbytes,
            tuple(sorted({*self.unverified_keys, *other.unverified_keys})),
        )


class Reads:
    """Reads of arrays from files. They go straight into the live memory if its layout allows, else through a copy.

    Not thread-safe.
    """

    def __init__(self, *, in_full: bool = False) -> None:
        """Begin without reads. ``in_full``: verify all wanted bytes, even if that reads many unwanted ones."""
        self._jobs: list[ReadJob] = []  # first, as it is freed first: the end of a job stops its reads into the others
        self._in_full = in_full
        self._queues: dict[Source, ReadQueue] = {}
        self._copies: list[tuple[Any, Any]] = []
        self._loose: set[str] = set()

    def _queue(self, source: Source) -> ReadQueue:
        queue = self._queues.get(source)
        if queue is None:
            queue = self._queues[source] = ReadQueue(source)
        return queue

    def add(self, source: Source, row: Row, shard: Shard) -> None:
        """Queue the elements that a stored row and a live shard of the same logical tensor share.

        The shard's other elements are left as they are, for rows of other files. Row and shard have the same element
        type, and may have any strides.

        Args:
            source: The file.
            row: The stored row, in a record of the file.
            shard: The live shard.

        Raises:
            ValueError: The logical tensors have different shapes.
            ImportError: The element type needs torch or ml_dtypes and neither is installed.
        """
        stored = row.shape, row.box, row.flat, row.global_shape
        if stored == (shard.shape, shard.offset, shard.flat, shard.global_shape):
            self._add_alike(self._queue(source), row, shard)
        else:
            self._add_part(self._queue(source), row, shard)

    def add_memory(self, source: Source, offset: int, place: Buffer) -> None:
        """Queue as many bytes as ``place`` has, from the file offset ``offset`` on. All are verified."""
        self._queue(source).add("", offset, place, whole=True)

    def add_many(self, source: Source, ranges: Ranges, owners: object) -> None:
        """Queue many ranges. ``owners`` keep the destinations' memory alive."""
        queue = self._queue(source)
        queue.many.append(ranges)
        queue.owners.append(owners)

    def _add_alike(self, queue: ReadQueue, row: Row, shard: Shard) -> None:
        place = arrays.place(shard, row.stride)
        if place is None:
            landing = array_memory.empty(replace(reference(row), kind=shard.kind))  # read there, then copied
            self._copies.append((shard.source, landing))
            place = replace(arrays.memory(landing), nbytes=span(row.shape, row.stride) * row.dtype.itemsize)
        offset = int(queue.source.data_offset[row.record]) + row.offset
        queue.add(row.key, offset, place, whole=row.is_whole)

    def _add_part(self, queue: ReadQueue, row: Row, shard: Shard) -> None:
        stored, wanted, itemsize = row.part, shard.part, row.dtype.itemsize
        place = arrays.place(shard, shard.stride)
        contiguous = strides.is_row_major(row.shape, row.stride) and strides.is_row_major(shard.shape, shard.stride)
        if place is not None and contiguous:
            first = int(queue.source.data_offset[row.record]) + row.offset
            if (one := parts.stretch(stored, wanted)) is not None:
                at, to, nbytes = (n * itemsize for n in one)
                if nbytes:
                    shared = Buffer(place.pointer + to, nbytes, place.device, place.stream, place.owner)
                    queue.add(row.key, first + at, shared, whole=False)
                return
            runs = parts.intersect(stored, wanted).regular().placed(itemsize, first)
            if place.device == HOST or _suit_device(runs):
                queue.add_runs(row.key, place, runs)
                return
        for block in parts.blocks(stored, wanted):
            self._land(queue, row, shard, block)

    def _land(self, queue: ReadQueue, row: Row, shard: Shard, block: Block) -> None:
        """Queue a block of a row of any strides, to be read into new host memory and copied to the live array."""
        itemsize = row.dtype.itemsize
        apart = row.stride if row.flat is None else [step * row.stride[0] for step in block.steps]
        runs, stride = _stretches(block.size, apart)
        landing = array_memory.empty(ArrayRef(row.key, shard.kind, row.dtype.name, block.size, stride))
        memory = replace(arrays.memory(landing), nbytes=int(runs.size.sum()) * itemsize)
        first = sum(b * s for b, s in zip(block.source, row.stride, strict=True))
        offset = first * itemsize + int(queue.source.data_offset[row.record]) + row.offset
        queue.add_runs(row.key, memory, runs.placed(itemsize, offset))
        self._copies.append((_region(shard, block), landing))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all reads fill."""
        return sum(queue.nbytes for queue in self._queues.values())

    def by_file(self) -> dict[Location, int]:
        """Bytes of memory that the reads of each file fill."""
        return {queue.source.path: queue.nbytes for queue in self._queues.values() if queue.nbytes}

    def conflict(self) -> str | None:
        """Keys of arrays whose memory other reads would fill with different bytes; None if there are none."""
        return overlaps.find(list(self._queues.values()))

    def close(self) -> None:
        """Stop the reads that still run. No memory is written afterwards."""
        for job in self._jobs:
            job.stop()
        for job in self._jobs:
            job.end()
        self._jobs.clear()
        _running.discard(self)

    def start(self, executor: Executor) -> None:
        """Begin to read all files at once. Call :meth:`finish` afterwards.

        :func:`~datastates.planning.read.plan_read` decides which chunks are verified.
        """
        queues = [queue for queue in self._queues.values() if not queue.is_empty]
        for other in list(_running):
            other._forget_if_done()
        try:
            self._submit(executor, queues)
        except DatastatesError:
            self._wait()
            raise
        except BaseException:  # an interrupt
            self.close()
            raise

    def _submit(self, executor: Executor, queues: Sequence[ReadQueue]) -> None:
        extent_nbytes = executor.extent_for(self.nbytes)
        spare = SMALL_STATE if self.nbytes < SMALL_STATE else 0
        if self._in_full:
            spare = sum(queue.source.nbytes for queue in queues)
        wanted = [(queue, queue.wanted) for queue in queues]
        for checked in (True, False):
            some = [one for one in wanted if one[1].chunks.checked is checked]
            plans = plan_several([ranges for _, ranges in some], extent_nbytes, spare)
            for (queue, _), plan in zip(some, plans, strict=True):
                source = queue.source
                self._jobs.append(executor.submit_read(source.path, plan, queue.memory, source.name_record))
                self._loose |= queue.unverified(plan)
        _running.add(self)  # not earlier: a read that begins meanwhile would see no job that runs

    def finish(self) -> Tally:
        """Wait until everything is read, then copy arrays that were not read straight into place.

        After it has returned or raised, no memory is written.

        Raises:
            CorruptError: Bytes do not match their checksum; some destinations have been overwritten by then.
            StorageError: Reading failed.
        """
        self._wait()
        for array, landing in self._copies:
            array_memory.assign(array, landing)
        stats = [job.stats() for job in self._jobs]
        needed, read, shared, unverified = (
            sum(s[f"bytes_{which}"] for s in stats) for which in ("needed", "read", "shared", "unverified")
        )
        return Tally(needed, read, shared, unverified, tuple(sorted(self._loose)))

    def timeline(self) -> list[Span]:
        """The spans of the work of all reads so far."""
        return [span for job in self._jobs for span in job.timeline()]

    def _wait(self) -> None:
        failures = []
        try:
            for job in self._jobs:  # waits for every job, even if another one fails
                try:
                    job.wait()
                except DatastatesError as error:
                    failures.append(error)
        except BaseException:  # an interrupt
            self.close()
            raise
        _running.discard(self)
        if failures:
            raise failures[0]

    def _forget_if_done(self) -> None:
        """Leave the running reads, if nobody has waited for the end and it is there."""
        try:
            is_done = all(job.wait(0) for job in self._jobs)
        except DatastatesError:
            is_done = True  # what still runs ends with the last reference to it
        if is_done:
            _running.discard(self)

    def run(self, executor: Executor) -> Tally:
        """Read everything: :meth:`start` and :meth:`finish`."""
        self.start(executor)
        return self.finish()


_running: set[Reads] = set()
"""Reads that have begun and not ended. Garbage never owns them: to free them is to wait for them, and the collector of
Python may run in a thread that reads for them."""
os.register_at_fork(after_in_child=_running.clear)


def _suit_device(runs: Runs) -> bool:
    """Whether runs are copied straight to a device. They are if that takes few copies of many bytes each.

    Rows that lie close together in the file are one copy.
    """
    nbytes, rows = runs.size.sum(), runs.count.sum()
    if rows == 1 or nbytes >= SMALL_COPY * rows:
        return True
    gap = (runs.source_step - runs.length).max()
    return bool(nbytes >= SMALL_COPY * len(runs) and nbytes >= SMALL_ROW * rows and gap <= GAP)


def _region(shard: Shard, block: Block) -> Any:
    """A block of a live array, as a view that can be copied into."""
    if shard.flat is None:
        return array_memory.region(shard.source, block.dest, block.size)
    array = array_memory.region(shard.source, block.dest, (shard.shape[0] - block.dest[0],))
    if arrays.kind_of(array) == "torch":
        steps = [step * array.stride(0) for step in block.steps]
        return array.as_strided(block.size, steps, array.storage_offset())
    steps = [step * array.strides[0] for step in block.steps]
    if isinstance(array, np.ndarray):
        return array_memory.strided(array, block.size, steps)
    import cupy

    return cupy.lib.stride_tricks.as_strided(array, block.size, steps)


def _stretches(size: Sequence[int], stride: Sequence[int]) -> tuple[Runs, tuple[int, ...]]:
    """The stretches to read for a strided box, and the strides of the box once the stretches lie end to end.

    All numbers count elements. A stretch reaches from the first to the last element along the dimension of the smallest
    stride, with all elements between them. Stretches that touch are joined.

    Returns:
        The stretches, counted from the box's first element; and the new strides of the box.
    """
    dims = sorted((d for d in range(len(size)) if size[d] > 1 and stride[d] > 0), key=lambda d: stride[d])
    compact = [0] * len(size)
    length = 1
    if dims:
        compact[dims[0]] = stride[dims[0]]
        length = (size[dims[0]] - 1) * stride[dims[0]] + 1
    extent = length
    outer: list[int] = []
    for d in dims[1:]:
        compact[d] = extent
        extent *= size[d]
        if stride[d] == length and not outer:
            length = extent
        else:
            outer.insert(0, d)
    sizes, steps, new_steps = ([column[d] for d in outer] for column in (size, stride, compact))
    return spread(sizes, steps, new_steps, length, 0, 0), tuple(compact)
