"""Reads tensors when they are accessed: :class:`Checkpoint`, a checkpoint as a mapping of full keys to arrays."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from datastates._base.sizes import CHUNK
from datastates.container.digests import digest_of
from datastates.container.rows import reference
from datastates.container.table import Row
from datastates.errors import ClosedError, DatastatesError
from datastates.executor.executor import Executor
from datastates.reading.needed_memory import refuse_large
from datastates.reading.new_part import NewParts
from datastates.reading.new_tensors import Batch, is_one_row, nbytes_of, span_nbytes
from datastates.reading.tensors import TensorFile, Tensors
from datastates.reading.tensors_ahead import MOST_NBYTES, NextTensors
from datastates.state import memory
from datastates.state.index import Index, nth
from datastates.state.new_memory import Into

_SMALL_READ = 4 * CHUNK
"""Largest array in bytes that is read by one plain read, which is faster than waking the executor's threads."""


class Checkpoint(Mapping[str, Any]):
    """The arrays of one checkpoint, by full key such as ``"model/wte.weight"``. Thread-safe.

    :func:`datastates.open` returns it. Use it as a context manager, or call :meth:`close`.

    Each access reads the array again, as a whole logical tensor: parts that several ranks saved are put together. An
    array that torch saved is a torch tensor if torch is installed, in host memory or on the device that
    :func:`datastates.open` was given. All others are NumPy arrays. Looking up a key reads no array data. Listing
    the keys opens the containers of all ranks. Objects are not in the mapping: :func:`datastates.load` reads them.

    While arrays are accessed in the order of the keys, as by iterating over :meth:`items`, the next arrays are read
    ahead, up to 512 MiB. An array that was read ahead and never asked for keeps its memory until the checkpoint is
    closed, or until arrays are accessed in order from another key on. In a checkpoint of several ranks, arrays are read
    ahead only after the keys were listed.
    """

    def __init__(
        self, stored: Tensors, executor: Callable[[int], Executor], reading: contextlib.ExitStack, into: Into
    ) -> None:
        """Take an opened checkpoint.

        Args:
            stored: The checkpoint's tensors.
            executor: Makes an executor for reading a number of bytes.
            reading: Protects the checkpoint from deletion until it is closed.
            into: Library and device of the new arrays.
        """
        self._stored = stored
        self._reading = reading
        self._into = into
        self._make_executor = executor
        self._executor: Executor | None = None
        self._ahead = NextTensors(stored, into)
        self._parts = NewParts(stored, into)
        self._closed = False
        self._lock = threading.Lock()

    @property
    def step(self) -> int | None:
        """The training step that the checkpoint was saved at; None if a checkpoint of another format does not say."""
        return self._stored.step

    @property
    def metadata(self) -> dict[str, str]:
        """The texts that files of safetensors hold beside their tensors, as ``safe_open(...).metadata()`` gives them.

        Empty for all other checkpoints. Of several files, those that are alike in each file that has them.
        """
        return dict(self._stored.metadata.texts)

    def __len__(self) -> int:
        """The number of arrays; raises as :meth:`__iter__` does."""
        with self._lock:
            return len(self._stored.keys)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the full keys in the order in which they were saved, rank 0's first.

        Raises:
            StorageError: The container of a rank is missing or cannot be read.
            FormatError: The container of a rank is damaged.
        """
        with self._lock:
            self._ahead.expect_first()
            return iter(self._stored.keys)

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
            OutOfMemoryError: The array is larger than 512 MiB, and than the free memory. Nothing was read.
            DatastatesError: Only a part of the tensor is there: this is one of several containers, or a container is
                missing.
            ImportError: The element type needs torch or ml_dtypes and neither is installed.
        """
        if not isinstance(key, str):
            raise KeyError(key)
        with self._lock:
            batch = None if self._closed else self._ahead.take(key)
            if batch is not None:
                self._ahead.fill(self._running)
        if batch is not None:
            with contextlib.suppress(DatastatesError):  # the error may be about another array of the batch
                return batch.take(key)
        return self._read_alone(key)

    def _read_alone(self, key: str) -> Any:
        with self._lock:
            (found,) = self._stored.whole([key])
            self._refuse_if_closed(key)
            _, sources = found
            is_small = is_one_row(sources) and span_nbytes(sources[0][1]) <= _SMALL_READ
            refuse_large(self._stored.path, nbytes_of(found), found[0].kind, self._into)
            batch = None if is_small else Batch({key: found}, self._into, self._running())
            self._ahead.fill(self._running)
        return self._read_small(*sources[0]) if batch is None else batch.take(key)

    def part(self, key: str, index: Index) -> Any:
        """Read and verify a part of one array, into new memory, without the rest.

        Each chunk of 256 KiB with a wanted element is read and verified as a whole. So a stretch of rows takes at most
        512 KiB more than it has, and columns take whole rows. In files with a checksum for each storage, as
        ``torch.save`` makes them, the storages that hold the part are read as a whole and verified once. Files of
        safetensors have no checksums.

        Args:
            key: The full key.
            index: As for ``array[index]``: integers, slices whose step is 1, and ``...``.

        Returns:
            What ``checkpoint[key][index]`` is, in row-major order.

        Raises:
            KeyError: There is no array with that key.
            IndexError: The index does not fit the array's shape.
            TypeError: The index is made of other things, such as a mask.
            ValueError: A slice has another step than 1.
            DatastatesError: As ``checkpoint[key]`` raises. Containers without an element of the part may be missing.
        """
        with self._lock:
            self._refuse_if_closed(key)
            array, reads, sources = self._parts.begin(key, index)
        self._parts.prove(sources)
        with self._lock:
            self._refuse_if_closed(key)
            reads.start(self._running())
        reads.finish()
        return array

    def shard(self, key: str, dim: int, rank: int, world_size: int) -> Any:
        """Read one of several equal parts of an array along a dimension, as a rank with tensor parallelism needs it.

        Args:
            key: The full key.
            dim: The dimension; it may be negative.
            rank: Number of the part.
            world_size: Number of the parts.

        Returns:
            What ``checkpoint[key].chunk(world_size, dim)[rank]`` is, in row-major order.

        Raises:
            IndexError: The array has no such dimension.
            TypeError: An argument is no integer.
            ValueError: The dimension does not divide by ``world_size``, or there is no such rank. Nothing was read.
            KeyError, DatastatesError: As :meth:`part` raises.
        """
        try:
            index = nth(self.shape(key), dim, rank, world_size)
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"{key!r}: {error}") from None
        return self.part(key, index)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of an array, which is not read. Raises KeyError, and as :meth:`__iter__` does."""
        with self._lock:
            return self._parts.row(key).global_shape

    def dtype(self, key: str) -> str:
        """The element type of an array, named as in torch: ``"bfloat16"``. Raises as :meth:`shape` does."""
        with self._lock:
            return self._parts.row(key).dtype.name

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

    def _refuse_if_closed(self, key: str) -> None:
        if self._closed:
            raise ClosedError(f"{self._stored.path} is closed: {key!r} can no longer be read")

    def _read_small(self, source: TensorFile, row: Row) -> Any:
        block = self._into.allocate(row.kind, span_nbytes(row))
        memory.assign(block, np.array(source.read_row(row)))
        return self._into.view(block, reference(row), 0)

    def _running(self) -> Executor:
        """The executor that reads arrays, made when it is first needed."""
        if self._executor is None:
            self._executor = self._make_executor(MOST_NBYTES)
        return self._executor

    def close(self) -> None:
        """Free threads and memory, and allow the deletion of the checkpoint. Idempotent.

        The call waits for reads that other threads have begun. Later accesses to arrays raise ClosedError. Keys and
        digests stay available as long as the files exist.
        """
        with self._lock:
            self._closed = True
            self._ahead.close()
            if self._executor is not None:
                self._executor.close()
                self._executor = None
            self._reading.close()

    def __enter__(self) -> Checkpoint:
        """Return the checkpoint itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the checkpoint."""
        self.close()
