"""Reads all tensors of files of another format into new memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from datastates.container.rows import logical, reference
from datastates.container.table import Row
from datastates.executor.executor import Executor
from datastates.formats.foreign_file import ForeignFile
from datastates.restoring.proof import check_block, check_tensor
from datastates.restoring.reads import Reads
from datastates.restoring.sources import TensorFile, Tensors
from datastates.state import arrays, memory


class LoadedTensors:
    """New memory for all tensors, and the reads that fill it.

    Tensors that are views of one record share its memory, as they did when they were saved. A tensor of several parts
    has memory of its own.

    Attributes:
        arrays: The tensors, by full key.
    """

    def __init__(self, tensors: Tensors, files: Sequence[ForeignFile], device: Any) -> None:
        """Allocate memory on ``device``, in host memory for None; nothing is read yet.

        Raises:
            DatastatesError: Only a part of a tensor is there.
            ImportError: An element type needs torch or ml_dtypes and neither is installed.
        """
        self.arrays: dict[str, Any] = {}
        self._tensors = tensors
        self._device = device
        self._reads = Reads(in_full=True)
        self._number = {id(file): number for number, file in enumerate(files)}
        self._records: dict[tuple[int, int], tuple[ForeignFile, int, Any]] = {}
        self._views: dict[tuple[object, ...], Any] = {}
        self._assembled: list[tuple[str, Sequence[tuple[TensorFile, Row]]]] = []
        keys = list(tensors.keys)
        for key, (row, sources) in zip(keys, tensors.whole(keys), strict=True):
            if len(sources) == 1 and row.flat is None:
                self.arrays[key] = self._view(*sources[0])  # type: ignore[arg-type]
                continue
            self.arrays[key] = memory.empty(logical(row), device)
            live = arrays.array_shard(key, self.arrays[key])
            for source, part in sources:
                self._reads.add(source, part, live)
            if sources:
                self._assembled.append((key, sources))

    def _view(self, source: ForeignFile, row: Row) -> Any:
        """A tensor in the memory of its record; the same object for tensors of the same place."""
        number = self._number[id(source)]
        place = number, row.record, row.offset, row.dtype, row.shape, row.stride
        if place not in self._views:
            _, _, block = self._record(number, source, row.record)
            self._views[place] = memory.view(block, reference(row), row.offset)
        return self._views[place]

    def _record(self, number: int, source: ForeignFile, record: int) -> tuple[ForeignFile, int, Any]:
        if (number, record) not in self._records:
            place = source.records[record]
            block = memory.allocate("torch", place.nbytes, self._device)
            self._reads.add_memory(source, place.offset, arrays.memory(block))
            self._records[number, record] = source, record, block
        return self._records[number, record]

    def read(self, executor: Callable[[int], Executor]) -> dict[str, Any]:
        """Read everything, and verify what has checksums.

        Returns:
            The tensors, by full key.

        Raises:
            CorruptError: A tensor does not match its checksum; the message names it.
            StorageError: Reading failed.
        """
        with contextlib.closing(self._reads):
            self._reads.run(executor(self._reads.nbytes))
        for source, record, block in self._records.values():
            check_block(source, record, source.name_record(record), block)
        for key, sources in self._assembled:
            check_tensor(self._tensors, key, self.arrays[key], sources)
        return self.arrays
