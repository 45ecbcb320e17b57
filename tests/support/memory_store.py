"""A store of objects in memory: the shortest one that keeps the contract."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from datastates.errors import StorageError
from datastates.storage.location import Location
from datastates.storage.objects import Entry, Store, Writer, absent


class MemoryStore(Store):
    """Objects in memory."""

    def __init__(self) -> None:
        """Begin without objects."""
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}

    @override
    def look(self, path: Location) -> Entry | None:
        with self._lock:
            if (found := self._objects.get(str(path))) is not None:
                return Entry("file", len(found[0]), found[1], found[1])
            is_folder = any(name.startswith(f"{path}/") for name in self._objects)
        return Entry("folder", 0, 0, None) if is_folder else None

    @override
    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        with self._lock:
            for name, (data, made) in self._objects.items():
                if name.startswith(f"{folder}/"):
                    below = name[len(f"{folder}/") :]
                    first, _, rest = below.partition("/")
                    if rest and not deep:
                        found[first] = Entry("folder", 0, 0, None)
                    else:
                        found[below] = Entry("file", len(data), made, made)
        return found

    @override
    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        with self._lock:
            if (found := self._objects.get(str(path))) is None:
                raise absent("read", path)
        if len(found[0]) < offset + nbytes:
            raise StorageError(0, "read", str(path), f"read {path}: it ends at {len(found[0])}")
        return found[0][offset : offset + nbytes]

    @override
    def create(self, path: Location, data: bytes) -> None:
        self._put(path, data, new=True)

    @override
    def replace(self, path: Location, data: bytes) -> None:
        self._put(path, data, new=False)

    def _put(self, path: Location, data: bytes, *, new: bool) -> None:
        with self._lock:
            if new and str(path) in self._objects:
                raise StorageError(errno.EEXIST, "create", str(path))
            last = max((made for _, made in self._objects.values()), default=0)
            self._objects[str(path)] = bytes(data), max(time.time_ns(), last + 1)

    @override
    def writer(self, path: Location) -> Writer:
        return _Writer(self, path)

    @override
    def discard(self, paths: Sequence[Location]) -> None:
        with self._lock:
            for path in paths:
                self._objects.pop(str(path), None)


class _Writer(Writer):
    def __init__(self, store: MemoryStore, path: Location) -> None:
        self._store, self._path, self._data = store, path, bytearray()

    @override
    def write(self, data: Any, offset: int) -> None:
        if offset != len(self._data):
            raise ValueError(f"{self._path}: a piece for {offset} after {len(self._data)} bytes")
        self._data += data

    @override
    def finish(self) -> None:
        self._store.create(self._path, bytes(self._data))

    @override
    def close(self) -> None:
        self._data = bytearray()
