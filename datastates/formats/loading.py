"""Reads tensors of files of another format into new memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from datastates.container.rows import logical, reference
from datastates.container.table import Row
from datastates.executor.executor import Executor
from datastates.restoring.proof import check_block, check_parts
from datastates.restoring.reads import Reads
from datastates.restoring.sources import TensorFile, Tensors
from datastates.state import arrays
from datastates.state.into import Into
from datastates.state.shards import ArrayRef

Place = tuple[int, int]
"""A file, by its id, and the number of a record."""


class Blocks:
    """New memory for whole records of files, the tensors that are views of it, and the reads that fill it.

    Tensors that are views of one record share its memory, as they did when they were saved.
    """

    def __init__(self, into: Into) -> None:
        """Begin without records. ``into`` says whose arrays to read into."""
        self.reads = Reads(in_full=True)
        self._into = into
        self._blocks: dict[Place, tuple[TensorFile, Any]] = {}
        self._views: dict[tuple[object, ...], Any] = {}

    def view(self, source: TensorFile, record: int, ref: ArrayRef, offset: int) -> Any:
        """A tensor at an offset of a record, in bytes: the same object for the same place.

        Raises:
            ImportError: The element type needs torch or ml_dtypes and neither is installed.
        """
        place = id(source), record, offset, ref.dtype, ref.shape, ref.stride
        if place not in self._views:
            self._views[place] = self._into.view(self._block(source, record), ref, offset)
        return self._views[place]

    def _block(self, source: TensorFile, record: int) -> Any:
        if (id(source), record) not in self._blocks:
            block = self._into.allocate("torch", int(source.record_nbytes[record]))
            self.reads.add_memory(source, int(source.data_offset[record]), arrays.memory(block))
            self._blocks[id(source), record] = source, block
        return self._blocks[id(source), record][1]

    def fill(self, executor: Callable[[int], Executor]) -> None:
        """Read everything, and compare each record that has a checksum with it.

        Raises:
            CorruptError: A record does not match its checksum; the message names a tensor in it.
            StorageError: Reading failed.
        """
        with contextlib.closing(self.reads), contextlib.closing(executor(self.reads.nbytes)) as made:
            self.reads.run(made)
        for (_, record), (source, block) in self._blocks.items():
            check_block(source, record, block)


def read_all(tensors: Tensors, executor: Callable[[int], Executor], into: Into) -> dict[str, Any]:
    """Read all tensors of a checkpoint into new memory, by full key, and verify those that have checksums.

    Raises:
        CorruptError: A tensor does not match its checksum; the message names it.
        DatastatesError: Only a part of a tensor is there.
        ImportError: An element type needs torch or ml_dtypes and neither is installed.
        StorageError: Reading failed.
    """
    found: dict[str, Any] = {}
    assembled: list[tuple[str, Sequence[tuple[TensorFile, Row]]]] = []
    blocks = Blocks(into)
    keys = list(tensors.keys)
    for key, (row, sources) in zip(keys, tensors.whole(keys), strict=True):
        if len(sources) == 1 and row.flat is None:
            source, one = sources[0]
            found[key] = blocks.view(source, one.record, reference(one), one.offset)
            continue
        found[key] = into.empty(logical(row))
        live = arrays.array_shard(key, found[key])
        for source, part in sources:
            blocks.reads.add(source, part, live)
        if sources:
            assembled.append((key, sources))
    blocks.fill(executor)
    for key, sources in assembled:
        check_parts(key, found[key], sources)
    return found
