"""A part of a stored tensor, read into new memory without the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datastates.container.table import Row
from datastates.errors import DatastatesError
from datastates.reading.needed_memory import refuse_large
from datastates.reading.proof import check_record
from datastates.reading.reads import Reads
from datastates.reading.tensors import FoundRow, Tensors
from datastates.state import arrays, parts, strides
from datastates.state.index import Index, indexed
from datastates.state.new_memory import Into
from datastates.state.parts import Part
from datastates.state.shards import ArrayRef
from datastates.storage.location import Location


class NewParts:
    """Reads parts of tensors. Not thread-safe, but for :meth:`prove`."""

    def __init__(self, stored: Tensors, into: Into) -> None:
        """Take the tensors, and library and device of the new arrays."""
        self._stored, self._into = stored, into
        self._proven: set[tuple[Location, int]] = set()

    def begin(self, key: str, index: Index) -> tuple[Any, Reads, list[FoundRow]]:
        """Allocate a part of a tensor, and queue the reads that fill it.

        Returns:
            The array, the reads, and the rows to :meth:`prove` before they are read.

        Raises:
            KeyError, DatastatesError: As :meth:`datastates.reading.tensors.Tensors.whole` raises.
            IndexError, TypeError, ValueError: As :func:`~datastates.state.index.indexed` raises.
            OutOfMemoryError: The part is large, and larger than the free memory.
        """
        row = self.row(key)
        try:
            chosen = indexed(index, row.global_shape)
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"{key!r} of shape {row.global_shape}: {error}") from None
        wanted = Part(row.global_shape, chosen.size, chosen.begin)
        (found,) = self._stored.sources([(row, wanted)])
        sources = [(source, one) for source, one in found if parts.uncovered(wanted, [one.part]) < wanted.numel]
        if parts.uncovered(wanted, [one.part for _, one in sources]):
            self._stored.whole([key])  # names what is missing
            raise DatastatesError(f"{key!r} cannot be read from {self._stored.path}: a part of it is in no file")
        refuse_large(self._stored.path, wanted.numel * row.dtype.itemsize, row.kind, self._into)
        array = self._into.empty(ArrayRef(key, row.kind, row.dtype.name, chosen.size, strides.row_major(chosen.size)))
        live = replace(arrays.array_shard(key, array), global_shape=row.global_shape, offset=chosen.begin)
        reads = Reads(in_full=True)
        for source, one in sources:
            reads.add(source, one, live)
        return array.reshape(chosen.shape), reads, sources

    def row(self, key: str) -> Row:
        """A row that tells a tensor's type and shape; raises as :meth:`begin` does."""
        if not isinstance(key, str):
            raise KeyError(key)
        if (row := self._stored.find(key)) is None:
            self._stored.whole([key])
            raise KeyError(key)
        return row

    def prove(self, sources: Sequence[FoundRow]) -> None:
        """Compare records whose chunks have no checksums with their own checksums, if they have one, each once.

        Raises:
            CorruptError: A record does not match its checksum.
            StorageError: Reading failed.
        """
        for source, row in sources:
            if not source.checked and (at := (source.path, row.record)) not in self._proven:
                check_record(source, row.record, source.name_record(row.record))
                self._proven.add(at)
