"""Reads tensors when they are accessed: :class:`Checkpoint`, a checkpoint as a mapping of full keys to arrays."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from operator import itemgetter
from types import TracebackType
from typing import Any

import numpy as np

from datastates._base.sizes import CHUNK
from datastates.container.digests import digest_of
from datastates.container.rows import reference
from datastates.container.table import Row
from datastates.errors import ClosedError
from datastates.executor.executor import Executor
from datastates.restoring.new_tensors import FoundTensor, each, is_one_row, queue, span_nbytes
from datastates.restoring.reads import Reads
from datastates.restoring.sources import FoundRow, TensorFile, Tensors
from datastates.state import memory
from datastates.state.into import Into

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
            executor: Makes an executor for reading so many bytes.
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
        (found,) = self._find([key])
        _, sources = found
        self._refuse_if_closed(key)
        if is_one_row(sources) and span_nbytes(sources[0][1]) <= _SMALL_READ:
            return self._read_small(*sources[0])
        reads = Reads(in_full=True)
        finish = queue(found, self._into, reads)
        if sources:
            self._run(reads, key, sources)
        return finish()

    def items(self) -> ItemsView[str, Any]:
        """The full keys and the arrays. Iterating reads each as ``[key]`` does, and the next ones meanwhile.

        Up to 512 MiB of arrays are read before they are asked for, or the next four arrays if these are larger. Nothing
        else keeps an array that the iterator has given out. An error is raised before the arrays that are looked up or
        read together with the one that it names.
        """
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """The arrays, to iterate over as over :meth:`items`."""
        return _Values(self)

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

    def _each(self) -> Iterator[tuple[str, Any]]:
        def unless_closed(item: tuple[str, Any]) -> tuple[str, Any]:
            self._refuse_if_closed(item[0])
            return item

        # not a generator, which would keep an array that it has given out
        return map(unless_closed, each(list(self), self._find, self._into, self._make_executor))

    def _refuse_if_closed(self, key: str) -> None:
        if self._closed:
            raise ClosedError(f"{self._stored.path} is closed: {key!r} can no longer be read")

    def _find(self, keys: Sequence[str]) -> Sequence[FoundTensor]:
        with self._lock:
            return self._stored.whole(keys)

    def _read_small(self, source: TensorFile, row: Row) -> Any:
        block = self._into.allocate(row.kind, span_nbytes(row))
        memory.assign(block, np.array(source.read_row(row)))
        return self._into.view(block, reference(row), 0)

    def _run(self, reads: Reads, key: str, sources: Sequence[FoundRow]) -> None:
        with self._lock:
            self._refuse_if_closed(key)
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


class _Items(ItemsView[str, Any]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._checkpoint = checkpoint

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._checkpoint._each()


class _Values(ValuesView[Any]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._checkpoint = checkpoint

    def __iter__(self) -> Iterator[Any]:
        return map(itemgetter(1), self._checkpoint._each())
