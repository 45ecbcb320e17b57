"""Whole tensors of a checkpoint in new memory: one, or each of many, while the next ones are being read."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datastates.container.rows import logical, reference
from datastates.container.table import Row
from datastates.executor.executor import Executor
from datastates.restoring.proof import check_block, check_parts
from datastates.restoring.reads import Reads
from datastates.restoring.sources import FoundRow
from datastates.state import arrays
from datastates.state.into import Into
from datastates.state.strides import span

BATCH_NBYTES = 128 << 20
"""Tensors are read together until they have so many bytes."""
UNDER_WAY = 4
"""Batches that are being read at a time."""
_BATCH_KEYS = 1024
"""Most tensors that are looked up and read together."""

FoundTensor = tuple[Row, Sequence[FoundRow]]
"""Any row of a tensor, and all rows that hold elements of it, each with its file."""
Finish = Callable[[], Any]
"""Called when the reads have ended: verifies what was not verified on the way, and returns the tensor."""


def is_one_row(sources: Sequence[FoundRow]) -> bool:
    """Whether a whole tensor is one row, whose strides it then has."""
    return len(sources) == 1 and sources[0][1].flat is None


def span_nbytes(row: Row) -> int:
    """Bytes from a row's first element to the end of its last one."""
    return span(row.shape, row.stride) * row.dtype.itemsize


def queue(found: FoundTensor, into: Into, reads: Reads) -> Finish:
    """Allocate a whole tensor, and queue the reads that fill it.

    Args:
        found: The tensor.
        into: Whose array to read into.
        reads: Gets the reads. They verify everything.
    """
    row, sources = found
    if is_one_row(sources):
        ((source, one),) = sources
        block = into.allocate(one.kind, span_nbytes(one))
        reads.add_memory(source, int(source.data_offset[one.record]) + one.offset, arrays.memory(block))

        def viewed() -> Any:
            check_block(source, one.record, block)
            return into.view(block, reference(one), 0)

        return viewed
    array = into.empty(logical(row))
    live = arrays.array_shard(row.key, array)
    for source, part in sources:
        reads.add(source, part, live)

    def put_together() -> Any:
        check_parts(row.key, array, sources)
        return array

    return put_together


class _Batch:
    """Tensors that are read together.

    Attributes:
        reads: Their reads.
        nbytes: Bytes of all their elements.
    """

    def __init__(self) -> None:
        self.reads = Reads(in_full=True)
        self.nbytes = 0
        self._tensors: deque[tuple[str, Finish]] = deque()

    def __len__(self) -> int:
        return len(self._tensors)

    def add(self, key: str, found: FoundTensor, into: Into) -> None:
        self._tensors.append((key, queue(found, into, self.reads)))
        row, _ = found
        self.nbytes += math.prod(row.global_shape) * row.dtype.itemsize

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Each tensor with its key. The batch keeps none that was taken."""
        self.reads.finish()
        self.reads = Reads()  # the old ones keep all tensors' memory
        while self._tensors:
            yield _finished(*self._tensors.popleft())  # not in a variable, which would keep it


def _finished(key: str, finish: Finish) -> tuple[str, Any]:
    return key, finish()


def each(
    keys: Sequence[str],
    find: Callable[[Sequence[str]], Sequence[FoundTensor]],
    into: Into,
    executor: Callable[[int], Executor],
) -> Iterator[tuple[str, Any]]:
    """Read whole tensors in order. While one batch of them is taken, the next ones are being read.

    Args:
        keys: Their full keys.
        find: Finds the tensors of some keys.
        into: Whose arrays to read into.
        executor: Makes an executor for reads of so many bytes.

    Returns:
        An iterator over the keys and tensors. What is still being read when it is closed is stopped.

    Raises:
        DatastatesError: What ``find`` raises, and what :meth:`~datastates.restoring.reads.Reads.finish` does, before
            the first tensor of a batch.
    """
    running: Executor | None = None
    under_way: deque[_Batch] = deque()
    try:
        for batch in _batches(keys, find, into):
            if running is None:
                running = executor(batch.nbytes if len(batch) == len(keys) else UNDER_WAY * BATCH_NBYTES)
            batch.reads.start(running)
            under_way.append(batch)
            if len(under_way) == UNDER_WAY:
                yield from under_way.popleft().tensors()
        while under_way:
            yield from under_way.popleft().tensors()
    finally:
        for batch in under_way:
            batch.reads.close()
        if running is not None:
            running.close()


def _batches(
    keys: Sequence[str], find: Callable[[Sequence[str]], Sequence[FoundTensor]], into: Into
) -> Iterator[_Batch]:
    for at in range(0, len(keys), _BATCH_KEYS):
        some = keys[at : at + _BATCH_KEYS]
        batch = _Batch()
        for key, found in zip(some, find(some), strict=True):
            batch.add(key, found, into)
            if batch.nbytes >= BATCH_NBYTES:
                yield batch
                batch = _Batch()
        if len(batch):
            yield batch
