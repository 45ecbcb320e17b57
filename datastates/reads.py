"""Arrays of one container, read and verified: planner and executor on the way up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from datastates import arrays, planner
from datastates.executor import Executor
from datastates.opened import Container
from datastates.protocol import HOST, ArrayRef, Buffer, Shard, span
from datastates.shard_table import Row


def reference(row: Row, *, key: str | None = None, requires_grad: bool = False) -> ArrayRef:
    """A row as providers see it."""
    return ArrayRef(row.key if key is None else key, row.kind, row.dtype.name, row.shape, row.stride, requires_grad)


@dataclass(slots=True, eq=False)
class Reads:
    """Arrays of one container to be read: straight into memory where the layout allows, else by way of a copy."""

    source: Container
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    _seen: set[tuple[int, int, int, int]] = field(default_factory=set)

    def add(self, row: Row, shard: Shard) -> None:
        """Read a row into a live array of the same shape and dtype."""
        place = arrays.place(shard, row.stride)
        if place is None:
            landing = arrays.empty(reference(row))
            self.copies.append((shard.source, landing))
            place = replace(arrays.memory(landing), nbytes=span(row.shape, row.stride) * row.dtype.itemsize)
        self.add_memory(int(self.source.index.data_offset[row.record]) + row.offset, place)

    def add_memory(self, offset: int, place: Buffer) -> None:
        """Read as many bytes as the memory has from an offset of the file."""
        same = (offset, place.nbytes, place.device, place.pointer)
        if same in self._seen:
            return  # tied tensors: the same bytes to the same memory
        self._seen.add(same)
        self.offsets.append(offset)
        self.lengths.append(place.nbytes)
        self.buffers.append(place)

    def conflict(self) -> int | None:
        """An offset whose bytes others would overwrite: live memory is shared that was not shared when saved."""
        device = np.array([b.device for b in self.buffers], np.int64)
        begin = np.array([b.pointer for b in self.buffers], np.uint64)
        order = np.lexsort((begin, device))
        device, begin = device[order], begin[order]
        end = begin + np.array(self.lengths, np.uint64)[order]
        if (end[:-1] <= begin[1:])[device[:-1] == device[1:]].all():
            return None  # nothing is shared
        furthest: int | None = None
        for i in order.tolist():
            place = self.buffers[i]
            if furthest is not None and self.buffers[furthest].device == place.device:
                other = self.buffers[furthest]
                shared = place.pointer < other.pointer + other.nbytes and place.nbytes
                if shared and self.offsets[i] - place.pointer != self.offsets[furthest] - other.pointer:
                    return int(self.offsets[i])
                if place.pointer + place.nbytes <= other.pointer + other.nbytes:
                    continue
            furthest = i
        return None

    def run(self, executor: Executor) -> None:
        """Read and verify everything; then make the copies."""
        offsets, nbytes = np.array(self.offsets, np.uint64), np.array(self.lengths, np.uint64)
        record = np.searchsorted(self.source.index.data_offset, offsets, side="right") - 1
        plan = planner.plan_read(
            file_offset=offsets,
            nbytes=nbytes,
            dest=np.arange(len(nbytes), dtype=np.int32),
            dest_offset=np.zeros(len(nbytes), np.uint64),
            dest_nbytes=nbytes,
            in_place=np.array([b.device == HOST for b in self.buffers], np.uint8),
            chunks=self.source.chunks(int(record.min()), int(record.max()) + 1)
            if len(record)
            else self.source.chunks(0, 0),
            extent_nbytes=executor.block - 2 * 4096,
        )
        job = executor.submit_read(self.source.path, plan, self.buffers, self.source.name_record)
        job.wait()
        for array, landing in self.copies:
            arrays.assign(array, landing)
