"""Open files of a file system: locks, and new files that are written in pieces."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from datastates import _native
from datastates.errors import StorageError, storage_errors
from datastates.storage.location import Location
from datastates.storage.store import ABSENT, Lock, Writer

_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)
"""Error numbers of transfers from file systems that open files for direct I/O only in name. As in the native core."""
_FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("<qQQQ")


class LocalLock(Lock):
    """A lock by ``flock``."""

    def __init__(self, file: _native.Descriptor) -> None:
        """Take the open file."""
        self._file = file

    def write(self, data: bytes) -> None:
        """Write to the file; raises OSError."""
        os.write(self._file.fileno(), data)

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


class LocalWriter(Writer):
    """A new file, written by ``pwrite``."""

    def __init__(
        self, path: Location, file: _native.Descriptor, call: Callable[[str, Location], AbstractContextManager[None]]
    ) -> None:
        """Take the open file, and ``call``, the context in which the store makes a system call."""
        self._path = path
        self._file = file
        self._call = call

    @override
    def write(self, data: Any, offset: int) -> None:
        at = 0
        while at < len(data):
            with self._call("write", self._path):
                try:
                    count = os.pwrite(self._file.fileno(), data[at:], offset + at)
                except OSError as error:
                    if error.errno not in _NO_DIRECT_IO or not self._flags() & os.O_DIRECT:
                        raise
                    self.write_unaligned()
                    continue
            if not count:
                raise StorageError(errno.ENOSPC, "write", str(self._path))
            at += count

    def _flags(self) -> int:
        return fcntl.fcntl(self._file.fileno(), fcntl.F_GETFL)

    @override
    def write_unaligned(self) -> None:
        fcntl.fcntl(self._file.fileno(), fcntl.F_SETFL, self._flags() & ~os.O_DIRECT)

    @override
    def share(self, source: Location, offset: int, nbytes: int, at: int) -> bool:
        # another file system, or one without reflinks; another failure comes again when the range is written
        try:
            with _native.open_descriptor(source, os.O_RDONLY, 0) as fd:
                fcntl.ioctl(self._file.fileno(), _FICLONERANGE, _RANGE.pack(fd, offset, nbytes, at))
        except OSError:
            return False
        return True

    @override
    def cut(self, nbytes: int) -> None:
        with self._call("truncate", self._path):
            os.ftruncate(self._file.fileno(), nbytes)

    @override
    def sync(self) -> None:
        with self._call("sync", self._path):
            os.fsync(self._file.fileno())

    @override
    def close(self) -> None:
        self._file.close()
