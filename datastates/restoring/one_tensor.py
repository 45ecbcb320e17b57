"""Reads one tensor at each access: :class:`Checkpoint`, a checkpoint as a mapping of full keys to arrays."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from datastates._base.sizes import CHUNK
from datastates.container.digests import digest_of
from datastates.container.rows import logical, reference
from datastates.container.table import Row
from datastates.errors import ClosedError
from datastates.executor.executor import Executor
from datastates.restoring.proof import check_block, check_parts
from datastates.restoring.reads import Reads
from datastates.restoring.sources import TensorFile, Tensors
from datastates.state import arrays, memory
from datastates.state.into import Into
from datastates.state.strides import span

_SMALL_READ = 4 * CHUNK
"""Up to so many bytes, one plain read is faster than waking the executor's threads, or even starting them."""


class Checkpoint(Mapping[str, Any]):
    """The arrays of one checkpoint, by full key such as ``"model/wte.weight"``. Thread-safe.

    :func:`datastates.open` returns it. Use it as a context manager, or call :meth:`close`.

    Each access reads the array again, as a whole logical tensor: parts that several ranks saved are put together. An
    array that came from torch is a torch tensor if torch is installed, in host memory or on the device that
    :func:`datastates.open` was given. All others are NumPy arrays. Looking up a key reads no array data. Listing
    the keys opens the containers of all ranks. Objects are not in the mapping: :func:`datastates.load` reads those.
    """

    def __init__(
        self, stored: Tensors, executor: Callable[[int], Executor], reading: contextlib.ExitStack, into: Into
    ) -> None:
        """Take an opened checkpoint.

        Args:
            stored: The checkpoint.
            executor: Makes an executor for reads of up to so many bytes.
            reading: Protects the checkpoint from deletion until it is closed.
            into: Whose arrays to read into.
        """
        self._stored = stored
        self._reading = reading
        self._into = into
        self._make_executor = executor
        self._executor: Executor | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def step(self) -> int | None:
        """The step that it was saved at; None if a checkpoint of another format does not say."""
        return self._stored.step

    def __len__(self) -> int:
        """The number of arrays; raises as :meth:`__iter__` does."""
        return len(self._keys())

    def __iter__(self) -> Iterator[str]:
        """Iterate over the full keys in the order in which they were saved, those of rank 0 first.

        Raises:
            StorageError: The container of a rank is missing or cannot be read.
            FormatError: The container of a rank is damaged.
        """
        return iter(self._keys())

    def _keys(self) -> Mapping[str, object]:
        with self._lock:
            return self._stored.keys

    def __contains__(self, key: object) -> bool:
        """Whether there is an array with that full key."""
        with self._lock:
            return isinstance(key, str) and self._stored.holds(key)

    def __getitem__(self, key: str) -> Any:
        """Read and verify one array, into new memory.

        Args:
            key: The full key.

        Returns:
            A torch tensor or a NumPy array with the shape of the logical tensor.

        Raises:
            KeyError: There is no array with that key.
            CorruptError: Its bytes do not match their checksum.
            FormatError: A file of the checkpoint is damaged.
            StorageError: Reading failed.
            ClosedError: The checkpoint is closed.
            DatastatesError: Only a part of the tensor is there: this is one of several containers, or one is missing.
            ImportError: The element type needs torch or ml_dtypes and neither is installed.
        """
        with self._lock:
            ((row, sources),) = self._stored.whole([key])
        if self._closed:
            raise ClosedError(f"{self._stored.path} is closed: {key!r} can no longer be read")
        if len(sources) == 1 and row.flat is None:
            return self._read_whole(*sources[0])
        array = self._into.empty(logical(row))
        live = arrays.array_shard(key, array)
        reads = Reads(in_full=True)
        for source, part in sources:
            reads.add(source, part, live)
        if sources:
            self._run(reads, key, sources)
            check_parts(key, array, sources)
        return array

    def digest(self, key: str) -> str | None:
        """The CRC-32 of an array's bytes in row-major order, as 8 hexadecimal digits; None if it was not stored.

        It depends only on the elements, not on how the array was cut into parts. The call reads no array data.

        Args:
            key: The full key.

        Raises:
            KeyError: There is no array with that key.
        """
        with self._lock:
            row = self._stored.find(key) if self._stored.holds(key) else None
            if row is None:
                raise KeyError(key)
            contributed = self._stored.digest(key)
        if contributed is None:
            return None
        nbytes = math.prod(row.global_shape) * row.dtype.itemsize
        return f"{digest_of(contributed, nbytes):08x}"

    def _read_whole(self, source: TensorFile, row: Row) -> Any:
        block = self._into.allocate(row.kind, span(row.shape, row.stride) * row.dtype.itemsize)
        if block.nbytes <= _SMALL_READ:
            memory.assign(block, np.array(source.read_row(row)))
        else:
            reads = Reads()
            reads.add_memory(source, int(source.data_offset[row.record]) + row.offset, arrays.memory(block))
            self._run(reads, row.key, [(source, row)])
            check_block(source, row.record, block)
        return self._into.view(block, reference(row), 0)

    def _run(self, reads: Reads, key: str, sources: Sequence[tuple[TensorFile, Row]]) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._stored.path} is closed: {key!r} can no longer be read")
            if self._executor is None:
                largest = sum(int(source.record_nbytes.max()) for source, _ in sources)
                self._executor = self._make_executor(largest)
            executor = self._executor
        reads.run(executor)

    def close(self) -> None:
        """Free threads and memory, and allow the deletion of the checkpoint. Idempotent.

        Waits for reads that run on its threads. Later accesses to arrays raise ClosedError. Keys and digests stay
        available as long as the files exist.
        """
        with self._lock:
            self._closed = True
            if self._executor is not None:
                self._executor.close()
                self._executor = None
            self._reading.close()

    def __enter__(self) -> Checkpoint:
        """The checkpoint itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
