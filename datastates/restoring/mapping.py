"""A checkpoint as a mapping: each array is read, and verified, when it is asked for."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from datastates._base.sizes import CHUNK
from datastates.container.digests import constants
from datastates.container.file import Container
from datastates.container.rows import logical, reference
from datastates.container.table import Row
from datastates.errors import ClosedError, DatastatesError
from datastates.executor.executor import Executor
from datastates.restoring.reads import Reads
from datastates.restoring.stored import Stored
from datastates.state import arrays, memory
from datastates.state.parts import Part, uncovered
from datastates.state.strides import span

_SMALL_READ = 4 * CHUNK
"""Bytes up to which one plain read is faster than waking the executor's threads, and far faster than starting them."""


class Checkpoint(Mapping[str, Any]):
    """The arrays of one checkpoint by full key (``"model/wte.weight"``), as host arrays. Thread-safe.

    An array that several ranks saved parts of is put together from them. Each access reads anew: torch's come as
    tensors where torch is installed, all others as NumPy arrays. Looking at keys reads no data; listing them opens the
    containers of all ranks. Objects are not in it: :func:`datastates.load` reads those.
    """

    def __init__(self, stored: Stored, executor: Callable[[int], Executor], reading: contextlib.ExitStack) -> None:
        """Keep an opened checkpoint.

        Args:
            stored: The checkpoint.
            executor: Makes one for reads of up to so many bytes.
            reading: Keeps the checkpoint from being deleted until it is closed.
        """
        self._stored = stored
        self._reading = reading
        self._make_executor = executor
        self._executor: Executor | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """The number it was saved under."""
        return self._stored.head.step

    def __len__(self) -> int:
        """How many arrays there are."""
        return len(self._keys())

    def __iter__(self) -> Iterator[str]:
        """Their keys, in the order in which they were saved, those of rank 0 first.

        Raises:
            StorageError: The container of a rank is missing.
        """
        return iter(self._keys())

    def _keys(self) -> Mapping[str, object]:
        with self._lock:
            return self._stored.keys

    def __contains__(self, key: object) -> bool:
        """Whether there is an array of that key."""
        with self._lock:
            return isinstance(key, str) and self._holds(key)

    def _holds(self, key: str) -> bool:
        # of one rank, there is nothing else that would know where the container is missing
        return key in self._stored.keys if self._stored.head.ranks == 1 else self._stored.holds(key)

    def __getitem__(self, key: str) -> Any:
        """Read one array into fresh host memory, verified.

        Raises:
            KeyError: There is none of that key.
            CorruptError: Its bytes do not match their checksum.
            StorageError: Reading failed.
            ClosedError: The checkpoint is closed.
            DatastatesError: Only a part of that tensor is there: this is one container of several, or one is missing.
            ImportError: The element type needs torch or ml_dtypes and neither is installed.
        """
        with self._lock:
            row, sources = self._find(key)
        if self._closed:
            raise ClosedError(f"{self._stored.head.path} is closed: {key!r} can no longer be read")
        if len(sources) == 1 and row.flat is None:
            return self._read_whole(*sources[0])
        array = memory.empty(logical(row))
        live = arrays.array_shard(key, array)
        reads = Reads(in_full=True)
        for source, part in sources:
            reads.add(source, part, live)
        if sources:
            self._run(reads, key, sources)
        return array

    def _find(self, key: str) -> tuple[Row, list[tuple[Container, Row]]]:
        """A row of an array, and those that together have all of it; an empty one has itself."""
        stored = self._stored
        if not self._holds(key):
            raise KeyError(key)
        row = stored.find(key)
        whole = None if row is None else Part.whole(row.global_shape)
        sources = [] if row is None or whole is None else stored.sources(row, whole)
        if row is None or whole is None or uncovered(whole, [found.part for _, found in sources]):
            why = ", ".join(path.name for _, path in sorted(stored.lost.items())) + " is missing"
            if row is not None and not stored.lost:
                why = f"it holds only a part of that tensor of shape {row.global_shape}"
            raise DatastatesError(f"{key!r} cannot be read from {stored.head.path}: {why}")
        return row, sources

    def digest(self, key: str) -> str | None:
        """The CRC-32 of an array's bytes in row-major order, as eight hex digits; None where it is not stored.

        It depends on nothing but the elements: not on how the array was cut into parts. Reads no data.

        Raises:
            KeyError: There is no array of that key.
        """
        with self._lock:
            row = self._stored.find(key) if self._holds(key) else None
            if row is None:
                raise KeyError(key)
            contributed = self._stored.digest(key)
        if contributed is None:
            return None
        nbytes = math.prod(row.global_shape) * row.dtype.itemsize
        return f"{contributed ^ int(constants(np.array([nbytes], np.uint64))[0]):08x}"

    def _read_whole(self, source: Container, row: Row) -> Any:
        block = memory.allocate(row.kind, span(row.shape, row.stride) * row.dtype.itemsize)
        if block.nbytes <= _SMALL_READ:
            np.asarray(block)[:] = np.frombuffer(source.read_row(row), np.uint8)
        else:
            reads = Reads()
            reads.add_memory(source, int(source.index.data_offset[row.record]) + row.offset, arrays.memory(block))
            self._run(reads, row.key, [(source, row)])
        return memory.view(block, reference(row), 0)

    def _run(self, reads: Reads, key: str, sources: Sequence[tuple[Container, Row]]) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._stored.head.path} is closed: {key!r} can no longer be read")
            if self._executor is None:
                largest = sum(int(source.index.record_nbytes.max()) for source, _ in sources)
                self._executor = self._make_executor(largest)
            executor = self._executor
        reads.run(executor)

    def close(self) -> None:
        """Give threads and memory back once running reads have ended; keys stay. Idempotent."""
        with self._lock:
            self._closed = True
            self._reading.close()
            if self._executor is not None:
                self._executor.close()
                self._executor = None

    def __enter__(self) -> Checkpoint:
        """The checkpoint itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
