"""Arrays in new memory that are views of whole records, and the reads that fill them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from datastates.executor.executor import Executor
from datastates.reading.proof import Check, check_block
from datastates.reading.reads import Reads
from datastates.reading.tensors import TensorFile
from datastates.state import arrays
from datastates.state.new_memory import Into
from datastates.state.shards import ArrayRef


class NewArrays:
    """Arrays in new memory, and the reads that fill and verify them. Not thread-safe.

    Arrays that are views of one record share its memory, as they did when they were saved.
    """

    def __init__(self, into: Into, place: Callable[[Any], Any] | None = None) -> None:
        """Begin without arrays.

        Args:
            into: Library and device of the arrays.
            place: Given the new byte array for a record with torch tensors, returns the byte array to use instead. None
                uses the new one itself.
        """
        self._into = into
        self._place = place
        self._queued = Reads(in_full=True)
        self._started: list[Reads] = []
        self._checks: list[Check] = []
        self._blocks: dict[tuple[int, int], Any] = {}  # by file and record
        self._views: dict[tuple[object, ...], Any] = {}

    def record(self, source: TensorFile, record: int, kind: str = "torch") -> Any:
        """The byte array that a whole record is read into; the same object for the same record.

        Args:
            source: The file.
            record: Number of the record.
            kind: The library that saved the arrays in the record.
        """
        if (id(source), record) not in self._blocks:
            block = self._into.allocate(kind, int(source.record_nbytes[record]))
            if self._place is not None and self._into.kind(kind) == "torch":
                block = self._place(block)
            self._queued.add_memory(source, int(source.data_offset[record]), arrays.memory(block))
            if not source.checked:
                self._checks.append(partial(check_block, source, record, block))
            self._blocks[id(source), record] = block
        return self._blocks[id(source), record]

    def view(self, source: TensorFile, record: int, ref: ArrayRef, offset: int) -> Any:
        """An array that is a view of a record; the same object for the same place.

        Args:
            source: The file.
            record: Number of the record.
            ref: Element type, shape and strides of the array.
            offset: Bytes from the beginning of the record to the array's first element.

        Raises:
            ImportError: The element type needs torch or ml_dtypes and neither is installed.
        """
        place = id(source), record, offset, ref.dtype, ref.shape, ref.stride
        if place not in self._views:
            self._views[place] = self._into.view(self.record(source, record), ref, offset)
        return self._views[place]

    @property
    def nbytes(self) -> int:
        """Bytes to read whose reads have not begun."""
        return self._queued.nbytes

    def start(self, executor: Executor) -> None:
        """Begin the reads that were queued since the last call."""
        queued, self._queued = self._queued, Reads(in_full=True)
        self._started.append(queued)
        queued.start(executor)

    def finish(self) -> None:
        """Wait until everything is read, and compare each record that has a checksum of its own with it.

        Raises:
            CorruptError: A tensor does not match its checksum; the message names it.
            StorageError: Reading failed.
        """
        for reads in self._started:
            reads.finish()
        for check in self._checks:
            check()

    def close(self) -> None:
        """Stop the reads that still run."""
        for reads in self._started:
            reads.close()

    def read(self, executor: Callable[[int], Executor]) -> None:
        """Run all reads; raises as :meth:`finish` does. ``executor`` makes an executor for a number of bytes."""
        with contextlib.closing(self), contextlib.closing(executor(self.nbytes)) as made:
            self.start(made)
            self.finish()
