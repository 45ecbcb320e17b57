"""The files of torch's reader and writer, by path or by address in a store."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import override

from datastates.storage import Location, store_of

_AT_ONCE = 1 << 20
"""Bytes of a request, where a caller reads fewer at a time."""


class StoreFiles(FileSystem):
    """What torch calls for files. Paths are left to torch. Raises StorageError, and ValueError without a store."""

    @override
    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        store_of(place := Location(path))
        return place.face

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return (Location(path) / suffix).face

    @override
    def exists(self, path: str | os.PathLike[str]) -> bool:
        return store_of(place).is_file(place) if (place := Location(path)).scheme else super().exists(path)

    @override
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if not (place := Location(path)).scheme:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        yield cast(io.IOBase, io.BufferedReader(_Object(place), _AT_ONCE))


class _Object(io.RawIOBase):
    """An object of a store that is read."""

    def __init__(self, path: Location) -> None:
        self._store, self._path, self._at = store_of(path), path, 0
        if (nbytes := self._store.length_if_there(path)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._nbytes = nbytes

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (0, self._at, self._nbytes)[whence] + offset
        return self._at

    @override
    def readinto(self, into: Any) -> int:
        most = min(self._store.traits.best_piece, max(self._nbytes - self._at, 0))
        if view := memoryview(into).cast("B")[:most]:
            self._store.read_into(self._path, [(self._at, view)])
        self._at += len(view)
        return len(view)
