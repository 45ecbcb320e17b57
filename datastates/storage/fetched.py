"""Ranges of an object in a file in memory: the native core reads files only, and not every store has some."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence

from datastates.errors import DatastatesError, storage_errors
from datastates.storage.local import opened
from datastates.storage.location import Location
from datastates.storage.stores import store_of


class Fetched:
    """Ranges of an object, at their own offsets in a file in memory. All else in the file are zeros, without memory.

    Attributes:
        path: The path of the file, which can be opened until this is closed.
    """

    def __init__(self, source: Location, begins: Sequence[int], ends: Sequence[int]) -> None:
        """Read the ranges from each begin to its end, in bytes; raises StorageError."""
        store = store_of(source)
        with storage_errors("read", source):
            made = os.memfd_create("datastates")
            try:
                self._file = opened(f"/proc/self/fd/{made}", os.O_RDWR)  # closed when it is dropped
            finally:
                os.close(made)
            self._source, self.path = source, f"/proc/self/fd/{self._file.fileno()}"
            os.truncate(self._file.fileno(), max(ends, default=0))
        if not ends:
            return
        memory, most = memoryview(mmap.mmap(self._file.fileno(), 0)), store.traits.best_piece
        parts = [(at, min(end, at + most)) for begin, end in _joined(begins, ends) for at in range(begin, end, most)]
        store.read_into(source, [(at, memory[at:end]) for at, end in parts])

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Let an error name the object instead of the file in memory."""
        try:
            yield
        except DatastatesError as error:
            error.args = tuple(self._renamed(one) for one in error.args)
            for name in ("path", "filename", "strerror"):
                if hasattr(error, name):
                    setattr(error, name, self._renamed(getattr(error, name)))
            raise

    def _renamed(self, text: object) -> object:
        return text.replace(self.path, str(self._source)) if isinstance(text, str) else text

    def close(self) -> None:
        """Free the memory, unless the file is open elsewhere. Idempotent."""
        self._file.close()


def _joined(begins: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges, ascending; those that touch or overlap are one."""
    first, last = 0, 0
    for begin, end in sorted(zip(begins, ends, strict=True)):
        if begin > last:
            if last > first:
                yield first, last
            first = begin
        last = max(last, end)
    if last > first:
        yield first, last
