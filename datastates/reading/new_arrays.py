"""Arrays in new memory: views of whole records, or put together from parts; and the reads that fill them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from datastates._base.columns import I64
from datastates.container.part_columns import PartColumns
from datastates.container.rows import logical, reference
from datastates.container.table import KINDS, WHOLE, Row
from datastates.errors import FormatError
from datastates.executor.executor import Executor
from datastates.reading.matching import Live, match
from datastates.reading.needed_memory import needed
from datastates.reading.proof import Check, check_block, check_parts
from datastates.reading.reads import Reads
from datastates.reading.tensors import Found, Held, TensorFile
from datastates.state import arrays, memory
from datastates.state.new_memory import Into
from datastates.state.parts import Part, uncovered
from datastates.state.shards import ArrayRef

READ_AT_ONCE = 1 << 30
"""Bytes of records to allocate before their reads begin. Reads then run while more memory is allocated."""


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


class AllTensors(NewArrays):
    """The tensors of some files in new memory, by number.

    A tensor that is one whole row is a view of its record. One of several rows has memory of its own, and so has each
    tensor in a record with parts of such a tensor.

    Attributes:
        wanted, found: The number of elements of each tensor, and of all its rows together.
    """

    def __init__(
        self, held: Sequence[Held], into: Into, place: Callable[[Any], Any] | None = None, *, apart: bool = False
    ) -> None:
        """Take the rows.

        Args:
            held: The rows of all tensors. These are numbered from 0, and each has a row.
            into: Library and device of the arrays.
            place: As for :class:`~datastates.reading.new_arrays.NewArrays`.
            apart: Whether each row is a tensor of its own, in the shape of the row, even if it is a part.

        Raises:
            FormatError: The rows of a tensor are of different types or shapes.
        """
        super().__init__(into, place)
        self._held = held
        self._file = np.repeat(np.arange(len(held)), [len(one.row) for one in held])
        self._row, tensor = np.concatenate([one.row for one in held]), np.concatenate([one.part for one in held])
        self._tables = [(one.file.shards, one.row) for one in held]
        part = PartColumns.of_each(self._tables)
        order = np.argsort(part.kind == WHOLE, kind="stable")
        self._at = np.zeros(int(tensor.max(initial=-1)) + 1, np.int64)  # for each tensor, the entry of one of its rows
        self._at[tensor[order]] = order  # a whole one, if there is one
        self._like = part[self._at]
        is_cut = len(tensor) > len(self._at)  # some tensor has several rows
        if is_cut and len(wrong := np.flatnonzero(~part.of_same_tensors(self._like[tensor]))):
            file, row = self._stored(int(wrong[0]))
            raise FormatError(f"{file.path}: {row.key!r} is of another type or shape than in other files")
        self.wanted, self.found = self._like.global_shape.prod(axis=1), np.zeros(len(self._at), np.int64)
        np.add.at(self.found, tensor, part.numel)
        is_view = np.full(len(self._at), True) if apart else self._like.kind == WHOLE
        record = self._column("record").astype(np.int64) | self._file << 32
        self._is_view = is_view & ~np.isin(record[self._at], record[~is_view[tensor] & (part.numel > 0)])
        columns = record, self._row, self._column("offset")
        self._record, self._rows, self._offset = (column[self._at].tolist() for column in columns)
        self._put: dict[int, Any] = {}

    def _column(self, name: str) -> Any:
        return np.concatenate([getattr(table, name)[row] for table, row in self._tables])

    def _stored(self, i: int) -> tuple[TensorFile, Row]:
        """The file and the row of an entry."""
        file = self._held[self._file[i]].file
        return file, file.shards.row(int(self._row[i]))

    def row(self, number: int) -> Row:
        """A row of a tensor."""
        return self._stored(self._at[number])[1]

    def begin(self, executor: Callable[[int], Executor], lacking: Callable[[str], Exception]) -> None:
        """Allocate all memory, and meanwhile begin to read and verify.

        Args:
            executor: Makes an executor for reading a number of bytes.
            lacking: Makes the error for a tensor, given its full key, if some of its elements are in no row.
        """
        host, device = needed(list({id(one.file): one.file for one in self._held}.values()), self._into)
        made = executor(host + device)
        if device:
            memory.reserve(device, self._into.device)
        views = np.flatnonzero(self._is_view)
        of_torch = np.array([self._into.kind(kind) == "torch" for kind in KINDS])[self._column("kind")[self._at[views]]]
        # torch memory can be viewed as arrays of both libraries
        kinds = dict(sorted(zip([self._record[i] for i in views.tolist()], of_torch.tolist(), strict=True)))
        waiting = 0  # summed here, as `nbytes` sorts all queued reads
        for record, is_torch in kinds.items():
            file, number = self._held[record >> 32].file, record & 0xFFFFFFFF
            self.record(file, number, "torch" if is_torch else "numpy")
            waiting += int(file.record_nbytes[number])
            if waiting >= READ_AT_ONCE:
                self.start(made)
                waiting = 0
        self._put_together(np.flatnonzero(~self._is_view), lacking)
        self.start(made)

    def _put_together(self, numbers: I64, lacking: Callable[[str], Exception]) -> None:
        """Allocate tensors that are no views, and queue the reads of their parts."""
        if not len(numbers):
            return
        likes = [self._stored(i)[1] for i in self._at[numbers].tolist()]
        made = [self._into.empty(logical(row)) for row in likes]
        self._put.update(zip(numbers.tolist(), made, strict=True))
        renumbered = np.full(len(self._at), -1)
        renumbered[numbers] = np.arange(len(numbers))
        held = [Held(one.file, renumbered[one.part], one.row) for one in self._held]
        held = [Held(one.file, one.part[one.part >= 0], one.row[one.part >= 0]) for one in held]
        live = Live.of_new(self._like[numbers].tensors(), [arrays.memory(array) for array in made])
        taken, _ = match(live, held, lambda i: likes[i].key, self._queued)
        rows = Found(likes, held)  # made only if one is needed
        for i in np.flatnonzero(~taken).tolist():
            if uncovered(Part.whole(likes[i].global_shape), [row.part for _, row in rows[i]]):
                raise lacking(likes[i].key)
            shard = arrays.array_shard(likes[i].key, made[i])
            for file, row in rows[i]:
                self._queued.add(file, row, shard)
        if not all(one.file.checked for one in held):
            checked = zip(likes, made, rows, strict=True)
            self._checks += [partial(check_parts, like.key, array, found) for like, array, found in checked]

    def array(self, number: int, known: tuple[TensorFile, int, ArrayRef] | None = None) -> Any:
        """A tensor; the same object each time. ``known`` describes a row: its file, its number there, its own array."""
        if number in self._put:
            return self._put[number]
        record, row = self._record[number], self._rows[number]
        file = self._held[record >> 32].file
        ref = known[2] if known and known[0] is file and known[1] == row else reference(file.shards.row(row))
        return self.view(file, record & 0xFFFFFFFF, ref, self._offset[number])
