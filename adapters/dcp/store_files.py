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
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder, but not below a mount that is lost."""
        store_of(place := Location(path)).make_folder(place)

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
        if mode == "rb":
            yield cast(io.IOBase, io.BufferedReader(_Object(place), _AT_ONCE))
            return
        with contextlib.closing(store_of(place).writer(place)) as made:
            yield _New(made)
            made.finish()


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


class _New(io.RawIOBase):
    """An object of a store that is written."""

    def __init__(self, made: Any) -> None:
        self._made, self._at = made, 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._made.write(view, self._at)
        self._at += len(view)
        return len(view)
