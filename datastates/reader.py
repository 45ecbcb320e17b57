"""A checkpoint as a mapping: each array is read, and verified, when it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from datastates import arrays, container
from datastates.errors import ClosedError, DatastatesError
from datastates.executor import Executor, read_bytes
from datastates.opened import Container
from datastates.plan import CHUNK
from datastates.protocol import Buffer, span
from datastates.reads import Reads, reference
from datastates.shard_table import Row

_SMALL_READ = 4 * CHUNK
"""Bytes up to which one plain read is faster than waking the executor's threads, and far faster than starting them."""


class Checkpoint(Mapping[str, Any]):
    """The arrays of one checkpoint by full key (``"model/wte.weight"``), as host arrays. Thread-safe.

    Each access reads anew: torch's come as tensors where torch is installed, all others as NumPy arrays. Looking at
    keys reads nothing. Objects are not in it: :func:`datastates.load` reads those.
    """

    def __init__(self, source: Container, executor: Callable[[int], Executor]) -> None:
        """Keep an opened container; ``executor`` makes one for reads of up to so many bytes."""
        self._source = source
        self._table = source.index.shards
        self._make_executor = executor
        self._executor: Executor | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """The number it was saved under."""
        return int(self._source.index.identity["step"])

    def __len__(self) -> int:
        """How many arrays there are."""
        return len(self._table)

    def __iter__(self) -> Iterator[str]:
        """Their keys, in the order in which they were saved."""
        return iter(self._table.by_key)

    def __contains__(self, key: object) -> bool:
        """Whether there is an array of that key."""
        return key in self._table.by_key

    def __getitem__(self, key: str) -> Any:
        """Read one array into fresh host memory.

        Raises:
            KeyError: There is none of that key.
            CorruptError: Its bytes do not match their checksum.
            StorageError: Reading failed.
            ClosedError: The checkpoint is closed.
            DatastatesError: The checkpoint holds only a part of that tensor.
            ImportError: The element type needs torch or ml_dtypes and neither is installed.
        """
        row = self._table.row(self._table.by_key[key])
        if self._closed:
            raise ClosedError(f"{self._source.path} is closed: {key!r} can no longer be read")
        if row.shape != row.global_shape:
            raise DatastatesError(
                f"{key!r} in {self._source.path} is a part (shape {row.shape}) of a tensor of shape "
                f"{row.global_shape}, which this version cannot read by itself"
            )
        block = arrays.allocate(row.kind, span(row.shape, row.stride) * row.dtype.itemsize)
        if block.nbytes <= _SMALL_READ:
            self._read_small(row, block)
        else:
            self._read_large(row, arrays.memory(block))
        return arrays.view(block, reference(row), 0)

    def _read_small(self, row: Row, block: Any) -> None:
        index = self._source.index
        record, chunk = int(index.data_offset[row.record]), row.offset // CHUNK
        begin = chunk * CHUNK
        end = min(-(-(row.offset + block.nbytes) // CHUNK) * CHUNK, int(index.record_nbytes[row.record]))
        data = memoryview(read_bytes(self._source.path)(record + begin, end - begin)) if block.nbytes else b""
        crcs = index.chunk_crc[int(index.first_chunk[row.record]) + chunk :]
        for at, crc in zip(range(0, len(data), CHUNK), crcs, strict=False):
            if container.crc32(data[at : at + CHUNK]) != crc:
                raise self._source.corrupt(row.key)
        np.asarray(block)[:] = np.frombuffer(data, np.uint8)[row.offset - begin :][: block.nbytes]

    def _read_large(self, row: Row, memory: Buffer) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._source.path} is closed: {row.key!r} can no longer be read")
            if self._executor is None:
                self._executor = self._make_executor(int(self._source.index.record_nbytes.max()))
            executor = self._executor
        reads = Reads(self._source)
        reads.add_memory(int(self._source.index.data_offset[row.record]) + row.offset, memory)
        reads.run(executor)

    def close(self) -> None:
        """Give threads and memory back once running reads have ended; keys stay. Idempotent."""
        with self._lock:
            self._closed = True
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
