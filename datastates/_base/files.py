"""System calls on a checkpoint's files, with fault points; errors name the operation and the path."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from datastates import _native
from datastates._base import faults
from datastates._base.tasks import each
from datastates.errors import StorageError

Descriptor = _native.Descriptor
ABSENT = (errno.ENOENT, errno.ESTALE)
"""What system calls report of a file that another process has deleted; the second one on NFS."""
_AT_ONCE = 32
_ADVISED = 512 << 10
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV)
"""What file systems report of a way to rename that they lack."""


@contextlib.contextmanager
def storage_errors(operation: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError of system calls into a StorageError with operation and path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno or 0, operation, str(path)) from error


@contextlib.contextmanager
def syscall(operation: str, path: Path, *, stage: str = "manifest") -> Iterator[None]:
    """As :func:`storage_errors`, and first pass the system call's fault point, whose name begins with ``stage``."""
    with storage_errors(operation, path):
        faults.hit(f"{stage}.{operation}", str(path))
        yield


def remove_folder(path: Path) -> None:
    """Delete a folder. Other processes may delete or add entries meanwhile: that is no error."""

    def tolerate(_: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], OSError) or error[1].errno not in (*ABSENT, errno.ENOTEMPTY):
            raise error[1]

    shutil.rmtree(path, onerror=tolerate)


def opened(path: Path | str, flags: int) -> Descriptor:
    """Open a file or folder, with the flags of ``os.open``. Raises OSError.

    The umask decides who may use a new file, as for any file that ``open()`` makes.
    Use it in a ``with`` block, which closes it. Unlike a bare number, it is also closed when an interrupt drops it.
    """
    return _native.open_descriptor(path, flags, 0o666)


def open_file(path: Path) -> Descriptor:
    """Open a file to read it. Raises OSError, also for a pipe, which might never open."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise StorageError(0, "open", str(path), f"open {path}: it is not a regular file")
    return opened(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Sync a directory, so that the names in it are on stable storage; raises StorageError."""
    with syscall("sync_directory", path), opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


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


def rename_new(source: Path, target: Path) -> None:
    """Rename a file to a name that nothing has; raises StorageError (EEXIST) where something has it.

    NFS knows no such rename: the file gets a second name there, and loses the first. Where there are no hard links
    either, as in some object stores that are mounted, what is made between a look and the rename is replaced.
    """
    with syscall("rename", target):
        try:
            _rename_noreplace(source, target)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
        else:
            return
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
            os.rename(source, target)
        else:
            os.unlink(source)


def _rename_noreplace(source: Path, target: Path) -> None:
    """The system call ``renameat2`` with ``RENAME_NOREPLACE``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # glibc before 2.28
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
        raise OSError(error := ctypes.get_errno(), os.strerror(error), str(target))


def write_file(path: Path, data: bytes, *, stage: str = "manifest") -> None:
    """Write a new file and sync it; raises StorageError."""
    with syscall("open", path, stage=stage):
        file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with file as fd:
        left = memoryview(data)
        with syscall("write", path, stage=stage):
            while left:
                left = left[os.write(fd, left) :]
        with syscall("sync", path, stage=stage):
            os.fsync(fd)


def will_need(path: Path, offset: int, nbytes: int) -> None:
    """Ask the system to read a range into the page cache meanwhile. What fails here fails again when it is read."""
    with contextlib.suppress(OSError), open_file(path) as fd:
        end = offset + nbytes
        for at in range(offset, end, _ADVISED):  # a call reads no more than the device takes in one request
            os.posix_fadvise(fd, at, min(_ADVISED, end - at), os.POSIX_FADV_WILLNEED)


def length(path: Path) -> int:
    """The length of a file in bytes; raises StorageError."""
    with storage_errors("stat", path):
        return path.stat().st_size


def lengths(paths: Sequence[Path]) -> list[int | None]:
    """The lengths of files in bytes, None for an absent one; raises StorageError."""
    return each(_length, paths, _AT_ONCE)  # on a shared file system each call takes long


def _length(path: Path) -> int | None:
    with storage_errors("stat", path):
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None


def read_bytes(path: Path) -> Callable[[int, int], bytes]:
    """Return a function that reads ``length`` bytes of a file at ``offset``.

    The function raises StorageError where the system call fails, and where the file ends before the last byte.
    """

    def read(offset: int, length: int) -> bytes:
        with storage_errors("read", path), open_file(path) as fd:
            parts = []
            while length:
                part = os.pread(fd, length, offset)
                if not part:
                    raise StorageError(0, "read", str(path), f"read {path}: the file ends at {offset}")
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
            return b"".join(parts)

    return read
