"""System calls on a checkpoint's files: each with a fault point, its errors with operation and path; and file locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from datastates import faults
from datastates.errors import StorageError


@contextlib.contextmanager
def step(operation: str, path: Path) -> Iterator[None]:
    """One system call on a checkpoint's files: a fault point before it, its error with operation and path."""
    try:
        faults.hit(f"manifest.{operation}", str(path))
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno or 0, operation, str(path)) from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; raises StorageError."""
    with step("sync_directory", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, each on stable storage, unless they are there; raises StorageError."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with step("mkdir", path):
        if path.exists() and not path.is_dir():  # another process may have made it by now
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and sync it; raises StorageError."""
    with step("open", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        left = memoryview(data)
        with step("write", path):
            while left:
                left = left[os.write(fd, left) :]
        with step("sync", path):
            os.fsync(fd)
    finally:
        os.close(fd)


# --- locks

_held: set[int] = set()


def hold(lock: int) -> None:
    """Keep a descriptor, and the lock on it, until :func:`release`; a forked child drops it."""
    _held.add(lock)


def release(lock: int) -> None:
    """Let a lock go. Idempotent."""
    if lock in _held:
        _held.remove(lock)
        os.close(lock)


def _drop_held() -> None:
    # a child that outlives its parent must not keep what the parent left from being cleared away
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_held)


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Lock a file: False when somebody is in the way, None where the file system has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_open(fd: int, path: Path) -> bool:
    """Whether a descriptor is of the file that is at ``path`` now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
