"""System calls on a checkpoint's files, with fault points; errors name the operation and the path."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from datastates._base import faults
from datastates.errors import StorageError


@contextlib.contextmanager
def syscall(operation: str, path: Path) -> Iterator[None]:
    """Pass the fault point of a system call, then turn its OSError into a StorageError with operation and path."""
    try:
        faults.hit(f"manifest.{operation}", str(path))
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno or 0, operation, str(path)) from error


def sync_directory(path: Path) -> None:
    """Sync a directory, so that the names in it are on stable storage; raises StorageError."""
    with syscall("sync_directory", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and sync each of their names; raises StorageError."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with syscall("mkdir", path):
        if path.exists() and not path.is_dir():  # another process may have made it meanwhile
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and sync it; raises StorageError."""
    with syscall("open", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        left = memoryview(data)
        with syscall("write", path):
            while left:
                left = left[os.write(fd, left) :]
        with syscall("sync", path):
            os.fsync(fd)
    finally:
        os.close(fd)


def read_bytes(path: Path) -> Callable[[int, int], bytes]:
    """Return a function that reads ``length`` bytes of a file at ``offset``.

    The function raises StorageError where the system call fails, and where the file ends before the last byte.
    """

    def read(offset: int, length: int) -> bytes:
        try:
            with path.open("rb", buffering=0) as file:
                parts = []
                while length:
                    part = os.pread(file.fileno(), length, offset)
                    if not part:
                        raise StorageError(0, "read", str(path), f"read {path}: the file ends at {offset}")
                    parts.append(part)
                    offset, length = offset + len(part), length - len(part)
                return b"".join(parts)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(error.errno or 0, "read", str(path)) from error

    return read
