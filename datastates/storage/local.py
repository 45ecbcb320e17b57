"""The store of file systems: its system calls. Errors name the operation and the path."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from datastates import _native
from datastates.errors import StorageError, storage_errors
from datastates.storage import local_files
from datastates.storage.extents import Extent
from datastates.storage.folders import FileWriter, Folders, Lock
from datastates.storage.local_extents import extents_of
from datastates.storage.local_files import FAILING, LocalLock, LocalWriter, settle
from datastates.storage.location import Location, PathLike
from datastates.storage.objects import ABSENT, Entry, Traits

_TRIES = 8
"""Tries to make a folder that other processes make and delete meanwhile."""
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_OF_ONE_FILE = (errno.EXDEV, errno.EMLINK, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""The error numbers of a link that tell of one file, or of the moment. All others mean that no links are offered."""
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""The error numbers that mean that nothing is at a path."""


class LocalStore(Folders):
    """Files and folders of file systems, by absolute path.

    Nothing is kept in memory but the mounts under the folders that :meth:`make_folder` was asked for.
    """

    traits = Traits(has_files=True)

    def __init__(self, stage: str) -> None:
        """Ignore ``stage``: only :class:`~datastates.storage.stores.FaultyStore` uses it."""
        del stage

    def _call(self, operation: str, path: Location, point: str = "") -> contextlib.AbstractContextManager[None]:
        """A context in which one system call is made. ``point``: its fault point, if not named like ``operation``."""
        del point
        return storage_errors(operation, path)

    @override
    def look(self, path: Location, *, follow: bool = True) -> Entry | None:
        with self._call("stat", path):
            try:
                found = os.stat(path, follow_symlinks=follow)
            except OSError as error:
                if error.errno in _NOTHING:
                    return None
                raise
        return _entry(found)

    @override
    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        with self._call("list", folder):
            try:
                with os.scandir(folder) as every:
                    for one in every:
                        with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
                            found[one.name] = _entry(one.stat(follow_symlinks=False))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
        if not deep:
            return found
        files = {name: entry for name, entry in found.items() if entry.kind == "file"}
        for name in (name for name, entry in found.items() if entry.kind == "folder"):
            files |= {f"{name}/{below}": entry for below, entry in self.entries(folder / name, deep=True).items()}
        return files

    @override
    def names(self, folder: Location, *, stale_ok: bool = False) -> list[str]:
        with self._call("list", folder):
            try:
                return os.listdir(folder)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR) or (stale_ok and error.errno == errno.ESTALE):
                    return []
                raise

    @override
    def numbers(self, folder: Location) -> dict[str, int]:
        with self._call("list", folder):
            try:
                with os.scandir(folder) as found:
                    return {entry.name: entry.inode() for entry in found}
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    return {}
                raise

    @override
    def free(self, path: Location) -> int | None:
        with self._call("statvfs", path):
            found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    @override
    def extents(self, path: Location) -> list[Extent] | None:
        with self._call("read", path), _open_file(path) as fd:
            return extents_of(fd)

    @override
    def is_in_memory(self, path: Location) -> bool:
        return local_files.kind_under(path) in ("tmpfs", "ramfs")

    @override
    def mount(self, path: Location) -> str:
        return local_files.under(path)

    @override
    def target(self, link: Location) -> str:
        with self._call("readlink", link):
            return os.readlink(link)

    @override
    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        with self._call("read", path, "read_range"), _open_file(path) as fd:
            parts = []
            while nbytes:
                part = os.pread(fd, nbytes, offset)
                if not part:
                    raise StorageError(0, "read", str(path), f"read {path}: the file ends at {offset}")
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
            return b"".join(parts)

    @override
    def read_all(self, path: Location, most: int | None = None) -> bytes:
        with self._call("read", path), _open_file(path) as fd:
            nbytes = os.fstat(fd).st_size
            if most is not None and nbytes > most:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            return b"".join(iter(lambda: os.read(fd, nbytes + 1), b""))

    @override
    def create(self, path: Location, data: bytes) -> None:
        with self._call("open", path):
            file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with file as fd:
            left = memoryview(data)
            with self._call("write", path):
                while left:
                    left = left[os.write(fd, left) :]
            settle([file], path, len(data), self._call)

    @override
    def replace(self, path: Location, data: bytes) -> None:
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with self._call("write", new):
            Path(new).write_bytes(data)
        self.rename(new, path)

    @override
    def touch(self, path: Location) -> None:
        with self._call("write", path):
            Path(path).touch()

    @override
    def writer(self, path: Location, *, direct: bool = False) -> FileWriter:
        # for reading, too: rclone then keeps the file in its cache, where it can be written at any place
        with self._call("open", path):
            file = opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        past_cache = None
        if direct:
            with contextlib.suppress(OSError):
                past_cache = opened(path, os.O_RDWR | os.O_DIRECT)
        return LocalWriter(path, file, past_cache, self._call)

    @override
    def make_folder(self, path: Location) -> None:
        found = self.look(path)
        if found is not None and found.kind == "folder" and local_files.is_known(path, found.place):
            return
        local_files.refuse_lost(path)
        self._make(path)
        if (made := self.look(path)) is not None:
            local_files.remember(path, made.place)

    def _make(self, path: Location) -> None:
        if os.path.isdir(path):
            return
        self._make(path.parent)
        self.add_folder(path, exist_ok=True)  # another process may have made it meanwhile
        self.sync_folder(path.parent)

    @override
    def add_folder(self, path: Location, *, exist_ok: bool = False) -> None:
        with self._call("mkdir", path):
            for left in reversed(range(_TRIES)):
                try:
                    os.mkdir(path)
                    return
                except OSError as error:  # of a folder that is there, a file system may report another one than EEXIST
                    found = self.look(path, follow=False) if exist_ok else None
                    if found is None:
                        if exist_ok and error.errno == errno.EEXIST and left:
                            continue  # another process has just deleted it
                        raise
                    if found.kind != "folder" and not os.path.isdir(path):
                        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error
                    return

    @override
    def set_changed(self, path: Location, changed: int) -> None:
        with self._call("utime", path):
            os.utime(path, ns=(changed, changed))

    @override
    def sync_folder(self, path: Location) -> None:
        with self._call("sync_directory", path), opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            _sync(fd)

    @override
    def link(self, source: Location, target: Location) -> bool:
        with self._call("link", target):
            if source.scheme or not stat.S_ISREG(os.lstat(source).st_mode):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(target))
            try:
                os.link(source, target)
            except FileExistsError:
                if not os.path.samefile(source, target):  # NFS: the answer to a first request was lost
                    raise
            except OSError as error:
                if error.errno in (*_OF_ONE_FILE, *_NOTHING):
                    raise
                return False  # CryFS says ERANGE
            try:
                with opened(target, os.O_RDONLY) as fd:
                    _sync(fd)  # who has copied the source may not have
            except BaseException:
                os.unlink(target)
                raise
        return True

    @override
    def rename(self, source: Location, target: Location) -> None:
        with self._call("rename", target):
            os.rename(source, target)

    @override
    def rename_new(self, source: Location, target: Location) -> None:
        """As :meth:`Folders.rename_new`.

        NFS knows no such rename: the file gets a second name there, and loses the first. Where there are no hard links
        either, as in some object stores that are mounted, a file that is made between a look and the rename is
        replaced. A way that fails counts as not offered, whatever the error number: that of the last way is raised.
        """
        with self._call("rename", target):
            for way in (_rename_noreplace, _link_and_unlink):
                try:
                    return way(source, target)
                except FileExistsError:
                    raise
                except OSError:
                    continue
            if self.exists(target, follow=False):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            os.rename(source, target)

    @override
    def remove(self, path: Location, *, missing_ok: bool = False, operation: str = "remove") -> None:
        with self._call(operation, path):
            try:
                os.unlink(path)
            except OSError as error:
                if not missing_ok or error.errno not in ABSENT:
                    raise

    @override
    def discard(self, paths: Sequence[Location]) -> None:
        for path in paths:
            self.remove(path, missing_ok=True)

    @override
    def remove_empty(self, folder: Location) -> None:
        with self._call("rmdir", folder):
            os.rmdir(folder)

    @override
    def remove_tree(self, folder: Location, *, tolerant: bool = False) -> None:
        def go_on(_: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
            if not isinstance(error[1], OSError) or error[1].errno not in (*ABSENT, errno.ENOTEMPTY):
                raise error[1]

        if tolerant:
            shutil.rmtree(folder, ignore_errors=True)
            return
        with self._call("remove", folder):
            shutil.rmtree(folder, onerror=go_on)

    @override
    def open_lock(self, path: Location, *, create: bytes | None = None, write: bool = True) -> Lock:
        if not write:
            with self._call("open", path):
                return LocalLock(_open_file(path, or_folder=True))
        with self._call("lock", path):
            lock = LocalLock(opened(path, os.O_RDWR | (0 if create is None else os.O_CREAT | os.O_APPEND)))
            if create is not None:
                lock.write(create)
            return lock


def _entry(found: os.stat_result) -> Entry:
    place = found.st_dev, found.st_ino
    version = (*place, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return Entry(_kind(found.st_mode), found.st_size, found.st_mtime_ns, version, place)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"


def opened(path: PathLike, flags: int) -> _native.Descriptor:
    """Open a file or folder, with the flags of ``os.open``. Raises OSError.

    The umask decides who may use a new file, as for any file that ``open()`` makes.
    Use it in a ``with`` block, which closes it. Unlike a bare number, it is also closed when an interrupt drops it.
    """
    return _native.open_descriptor(path, flags, 0o666)


def _open_file(path: Location, *, or_folder: bool = False) -> _native.Descriptor:
    """Open a file to read it. Raises OSError, also for a pipe, which might never open."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or (or_folder and stat.S_ISDIR(mode))):
        raise StorageError(0, "open", str(path), f"open {path}: it is not a regular file")
    return opened(path, os.O_RDONLY)


def _sync(fd: int) -> None:
    """Put on stable storage what a descriptor for reading is of. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in FAILING or _call_libc("syncfs", fd):
            raise


def _rename_noreplace(source: Location, target: Location) -> None:
    """The system call ``renameat2`` with ``RENAME_NOREPLACE``."""
    paths = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target))
    if error := _call_libc("renameat2", *paths, _RENAME_NOREPLACE):
        raise OSError(error, os.strerror(error), str(target))


def _link_and_unlink(source: Location, target: Location) -> None:
    os.link(source, target)
    os.unlink(source)


def _call_libc(name: str, *arguments: int | bytes) -> int:
    """Make a system call that Python does not offer; returns the error number, 0 for success."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, name):  # renameat2 in glibc before 2.28
        return errno.ENOSYS
    return ctypes.get_errno() if getattr(libc, name)(*arguments) else 0
