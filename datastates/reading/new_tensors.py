"""Whole tensors of a checkpoint, read together into new memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from datastates.container.rows import logical, reference
from datastates.container.table import Row
from datastates.errors import ClosedError
from datastates.executor.executor import Executor
from datastates.reading.proof import Check, check_block, check_parts
from datastates.reading.reads import Reads
from datastates.reading.tensors import FoundRow
from datastates.state import arrays, memory
from datastates.state.new_memory import Into
from datastates.state.strides import span

FoundTensor = tuple[Row, Sequence[FoundRow]]
"""A stored tensor: any of its rows, and all rows that hold elements of it, each with its file."""


def is_one_row(sources: Sequence[FoundRow]) -> bool:
    """Whether a whole tensor is stored as one row. It is then read with the strides of the row."""
    return len(sources) == 1 and sources[0][1].flat is None


def span_nbytes(row: Row) -> int:
    """Bytes from a row's first element to the end of its last one."""
    return span(row.shape, row.stride) * row.dtype.itemsize


def nbytes_of(found: FoundTensor) -> int:
    """Bytes of the memory that a whole tensor is read into."""
    row, sources = found
    return span_nbytes(sources[0][1]) if is_one_row(sources) else math.prod(row.global_shape) * row.dtype.itemsize


def reserve(found: Iterable[FoundTensor], into: Into) -> None:
    """Let torch reserve memory for tensors on the CUDA device that they are read to, if there is one."""
    if into.device is not None:
        memory.reserve(sum(nbytes_of(one) for one in found if into.kind(one[0].kind) == "torch"), into.device)


def new_tensor(found: FoundTensor, into: Into, reads: Reads) -> tuple[Any, Check]:
    """Allocate a whole tensor, and queue the reads that fill it.

    Args:
        found: The stored tensor.
        into: Library and device of the new tensor.
        reads: Gets the reads. It must be made with ``in_full``.

    Returns:
        The tensor, and a function that verifies it after the reads have ended.
    """
    row, sources = found
    if is_one_row(sources):
        ((source, one),) = sources
        block = into.allocate(one.kind, span_nbytes(one))
        reads.add_memory(source, int(source.data_offset[one.record]) + one.offset, arrays.memory(block))

        return into.view(block, reference(one), 0), partial(check_block, source, one.record, block)
    array = into.empty(logical(row))
    live = arrays.array_shard(row.key, array)
    for source, part in sources:
        reads.add(source, part, live)

    return array, partial(check_parts, row.key, array, sources)


class Batch:
    """Whole tensors that are read together. Thread-safe."""

    def __init__(self, found: Mapping[str, FoundTensor], into: Into, executor: Executor) -> None:
        """Allocate the tensors, and begin to read them.

        Args:
            found: The stored tensors by full key.
            into: Library and device of the new tensors.
            executor: Reads the tensors.

        Raises:
            DatastatesError: As :meth:`~datastates.reading.reads.Reads.start` raises.
        """
        self._lock = threading.Lock()
        self._reads: Reads | None = Reads(in_full=True)
        reserve(found.values(), into)
        self._read = {key: new_tensor(one, into, self._reads) for key, one in found.items()}
        self._reads.start(executor)

    def take(self, key: str) -> Any:
        """Wait until all tensors are read, and hand one out. The batch does not keep it.

        Raises:
            DatastatesError: As :meth:`~datastates.reading.reads.Reads.finish` raises, about any tensor of the batch.
            ClosedError: The batch is closed, or has raised an error before.
        """
        with self._lock:
            reads, self._reads = self._reads, None  # the reads would keep all tensors' memory
            if reads is not None:
                try:
                    reads.finish()
                except BaseException:
                    self._read.clear()
                    raise
            array, check = self._read.pop(key, (None, None))
        if check is None:
            raise ClosedError(f"{key!r} was not read")
        check()
        return array

    def close(self) -> None:
        """Stop the reads that still run, and free the tensors that were not taken."""
        with self._lock:
            if self._reads is not None:
                self._reads.close()
                self._reads = None
            self._read.clear()
