"""Files and mounts of a file system: locks, new files that are written in pieces, and mounts that are lost."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from typing_extensions import override

from datastates import _native
from datastates._base.sizes import PAGE
from datastates.errors import StorageError, storage_errors
from datastates.storage.folders import FileWriter, Lock
from datastates.storage.location import Location, PathLike
from datastates.storage.objects import ABSENT

Call: TypeAlias = Callable[[str, Location], AbstractContextManager[None]]
"""A context in which one system call is made, given its operation and path."""
FAILING = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""Error numbers of storage that fails or is full. Any other one, of a faster or safer way to do something, says that
the file system does not offer that way. As in the native core.
"""
_FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("<qQQQ")


class LocalLock(Lock):
    """A lock by ``flock``."""

    def __init__(self, file: _native.Descriptor) -> None:
        """Take the open file."""
        self._file = file

    def write(self, data: bytes) -> None:
        """Write to the file, and let its server have the bytes now; raises OSError.

        Each close of a descriptor flushes. s3fs would else upload the file when the lock is given up: under the name
        that it had when it was opened, whatever was renamed or removed meanwhile.
        """
        os.write(self._file.fileno(), data)
        os.close(os.dup(self._file.fileno()))

    @override
    def hold(self, *, shared: bool = False) -> bool | None:
        try:
            fcntl.flock(self._file.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    @override
    def is_at(self, path: Location) -> bool:
        with storage_errors("stat", path):
            try:
                return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path))
            except OSError as error:
                if error.errno in ABSENT:
                    return False
                raise

    @override
    def close(self) -> None:
        self._file.close()


class LocalWriter(FileWriter):
    """A new file, written by ``pwrite``."""

    def __init__(
        self, path: Location, file: _native.Descriptor, past_cache: _native.Descriptor | None, call: Call
    ) -> None:
        """Take the open file.

        Args:
            path: Its path.
            file: The file, open for writing.
            past_cache: The file once more, open for direct I/O. A flag of one descriptor will not do: the servers of
                FUSE do not hear of its change.
            call: The context in which the store makes a system call.
        """
        self._path = path
        self._file = file
        self._past_cache = past_cache
        self._is_direct = past_cache is not None
        self._call = call
        self._nbytes = 0
        self._finished = False

    @override
    def write(self, data: Any, offset: int) -> None:
        at = 0
        while at < len(data):
            with self._call("write", self._path):
                count = self._write(data[at:], offset + at)
            if not count:
                raise StorageError(errno.ENOSPC, "write", str(self._path))
            at += count
        self._nbytes = max(self._nbytes, offset + at)

    def _write(self, data: Any, offset: int) -> int:
        """Write the first bytes, whole pages past the cache; returns their number."""
        whole = len(data) // PAGE * PAGE
        if self._past_cache is not None and self._is_direct and whole and offset % PAGE == 0:
            try:
                return os.pwrite(self._past_cache.fileno(), data[:whole], offset)
            except OSError as error:
                if error.errno in FAILING:
                    raise
                self._is_direct = False
        return os.pwrite(self._file.fileno(), data, offset)

    @override
    def share(self, source: Location, offset: int, nbytes: int, at: int) -> bool:
        if source.scheme:
            return False
        # another file system, or one without reflinks; another failure comes again when the range is written
        try:
            with self._call("share", self._path), _native.open_descriptor(source, os.O_RDONLY, 0) as fd:
                fcntl.ioctl(self._file.fileno(), _FICLONERANGE, _RANGE.pack(fd, offset, nbytes, at))
        except StorageError:
            return False
        self._nbytes = max(self._nbytes, at + nbytes)
        return True

    @property
    def _files(self) -> list[_native.Descriptor]:
        return [self._file] if self._past_cache is None else [self._past_cache, self._file]

    @override
    def sync(self) -> None:
        _sync(self._files, self._path, self._call)

    @override
    def leave(self) -> None:
        self._finished = True
        self.close()

    @override
    def finish(self) -> None:
        settle(self._files, self._path, self._nbytes, self._call)
        self._finished = True

    @override
    def close(self) -> None:
        if self._past_cache is not None:
            self._past_cache.close()
        self._file.close()
        if not self._finished:
            self._finished = True
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def settle(files: Sequence[_native.Descriptor], path: Location, nbytes: int, call: Call) -> None:
    """Put a new file on stable storage, look at its length, and close it.

    Args:
        files: The descriptors that it was written by.
        path: Its path.
        nbytes: The length that was written, in bytes.
        call: The context in which the store makes a system call.

    Raises:
        StorageError: A system call failed, or the file has another length.
    """
    _sync(files, path, call)
    with call("stat", path):
        found = os.fstat(files[-1].fileno()).st_size
    if found != nbytes:
        raise StorageError(
            errno.EIO,
            "write",
            str(path),
            f"write {path}: the file has {found} bytes after {nbytes} were written and synced: its file system does "
            "not keep files as they are written. Mount it with other options, or save to another one",
        )
    for file in files:  # some file systems tell only then what they lost
        with call("close", path):
            file.close_written()


def _sync(files: Sequence[_native.Descriptor], path: Location, call: Call) -> None:
    for file in files:  # a server of FUSE may keep what was written by another one
        with call("sync", path):
            os.fsync(file.fileno())


_ESCAPED = re.compile(rb"\\([0-7]{3})")
_used: set[str] = set()
_places: dict[str, tuple[int, ...]] = {}
_MOST = 1 << 12


def is_known(path: PathLike, place: tuple[int, ...]) -> bool:
    """Whether a folder is where it was when it was remembered."""
    return _places.get(os.fspath(path)) == place


def remember(path: PathLike, place: tuple[int, ...]) -> None:
    """Keep the place of a folder, and the mount under it."""
    if mount := under(path):
        _used.add(mount)
    if len(_places) >= _MOST:
        _places.clear()
    _places[os.fspath(path)] = place


def refuse_lost(path: PathLike) -> None:
    """Raise StorageError if a path leads into a mount point that was remembered and is mounted no longer."""
    real = os.path.realpath(path)
    now = _points()
    if now and (lost := _deepest(real, _used - now.keys())) and len(lost) > len(_deepest(real, now)):
        raise StorageError(
            errno.ENOENT, "mkdir", os.fspath(path), f"{os.fspath(path)} is not there: the mount at {lost} is lost"
        )


def under(path: PathLike) -> str:
    """The mount point that holds a path; empty if the system does not tell."""
    return _deepest(os.path.realpath(path), _points())


def kind_under(path: PathLike) -> str:
    """The kind of the file system that holds a path; empty if the system does not tell."""
    points = _points()
    return points.get(_deepest(os.path.realpath(path), points), "")


def _points() -> dict[str, str]:
    """The mount points of this process, each with the kind of what is mounted there last."""
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]
        return {
            os.fsdecode(_ESCAPED.sub(lambda m: bytes([int(m[1], 8)]), line[4])): line[line.index(b"-") + 1].decode()
            for line in lines
        }
    return {}


def _deepest(path: str, points: Collection[str]) -> str:
    while path not in points:
        if path in ("/", ""):
            return ""
        path = os.path.dirname(path)
    return path
