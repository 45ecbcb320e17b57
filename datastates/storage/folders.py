"""The contract of a store that has folders, too, as file systems have: directories of checkpoints lie there.

Objects are files here, and a file is made in a folder that is there. Errors are as in ``objects.py``.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType

from typing_extensions import Buffer, override

from datastates.storage.extents import Extent
from datastates.storage.location import Location
from datastates.storage.objects import Entry, Store, Writer

_LONG = 24 * 3600.0


class Lock(ABC):
    """A file or folder that is open to be locked. Closing it gives the lock up; a forked child closes it, too."""

    @abstractmethod
    def hold(self, *, shared: bool = False) -> bool | None:
        """Lock the file without waiting: True if locked, False if another holds it, None if no lock is possible."""

    @abstractmethod
    def is_at(self, path: Location) -> bool:
        """Whether the path still leads to this file."""

    @abstractmethod
    def close(self) -> None:
        """Give the lock up. Idempotent."""

    def __enter__(self) -> Lock:
        """Return this lock; the block's end closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close this lock."""
        self.close()


class FileWriter(Writer):
    """A new file that is being written, at any offsets. Readers may see a part of it before it is finished."""

    @abstractmethod
    def share(self, source: Location, offset: int, nbytes: int, at: int) -> bool:
        """Take ``nbytes`` at ``offset`` of another file over to ``at`` without a copy; False where that cannot be."""

    @abstractmethod
    def sync(self) -> None:
        """Put what was written on stable storage. The file stays open."""

    @abstractmethod
    def leave(self) -> None:
        """Close the file as it is, for others to go on with. Nothing of it need be on stable storage."""

    @abstractmethod
    def finish(self) -> None:
        """Put the file on stable storage, and close it. Its name is durable after :meth:`Folders.sync_folder`.

        Raises StorageError with EIO if the file does not end where the last byte was written.
        """


class Folders(Store):
    """The contract of a store of files and folders, by path."""

    # --- looking

    @abstractmethod
    def look(self, path: Location, *, follow: bool = True) -> Entry | None:
        """Describe the file, folder or link at a path; None without one. ``follow``: describe a link's target."""

    def is_link(self, path: Location) -> bool:
        """Whether a link is at a path."""
        return (entry := self.look(path, follow=False)) is not None and entry.kind == "link"

    def exists(self, path: Location, *, follow: bool = True) -> bool:
        """Whether anything is at a path."""
        return self.look(path, follow=follow) is not None

    @abstractmethod
    def names(self, folder: Location, *, stale_ok: bool = False) -> list[str]:
        """All names in a folder that were made before this call, in any order; none if there is no folder.

        ``stale_ok``: NFS' ESTALE means that another process has deleted the folder, and not that a mount was lost.
        """

    def free(self, path: Location) -> int | None:
        """Bytes that are free for this user where a path lies; None where the store does not tell."""
        del path
        return None

    def extents(self, path: Location) -> list[Extent] | None:
        """Where the bytes of a file lie on the disk, ascending; None where the store does not tell."""
        del path
        return None

    def is_in_memory(self, path: Location) -> bool:
        """Whether a path lies in memory of this host, as on tmpfs."""
        del path
        return False

    def mount(self, path: Location) -> str:
        """Where the storage that holds a path is mounted; empty where there is no such thing."""
        del path
        return ""

    def has_stood_still(self, folder: Location) -> bool:
        """Whether nothing in a folder has changed for a day, so that nobody is expected to write into it any more."""
        return time.time() - self._last_change(folder) / 1e9 > _LONG

    def _last_change(self, path: Location) -> int:
        """When a file, or anything in a folder, was last changed, as :attr:`Entry.changed`; 0 if it is gone."""
        found = self.look(path, follow=False)
        if found is None or found.kind != "folder":
            return 0 if found is None else found.changed
        return max([found.changed, *(self._last_change(path / name) for name in self.names(path))])

    @abstractmethod
    def target(self, link: Location) -> str:
        """The path that a link holds."""

    # --- writing

    @abstractmethod
    def create(self, path: Location, data: bytes) -> None:
        """Write a new file to stable storage. Its name is durable after :meth:`sync_folder`."""

    def link(self, source: Location, target: Location) -> bool:
        """Give a file a second name, which nothing has, and put its bytes on stable storage.

        Returns False where that is not offered. Raises StorageError where this file cannot be linked, as with ENOENT,
        EXDEV and EMLINK. Then nothing has the name.
        """
        del source, target
        return False

    @abstractmethod
    def touch(self, path: Location) -> None:
        """Make an empty file, not durable, unless a file is there."""

    @abstractmethod
    def writer(self, path: Location, *, direct: bool = False) -> FileWriter:
        """Begin to write a new file in pieces. ``direct``: whole pages go past the system's cache, where they can."""

    @override
    def upload(self, path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        super().upload(new, pieces, nbytes)
        self.rename(new, path)
        self.sync_folder(path.parent)

    @abstractmethod
    def make_folder(self, path: Location) -> None:
        """Make a folder and missing folders above it, each durable. It is no error if the folder is there.

        Raises StorageError if the process has made a folder in the same way on a mount that is lost: the folder would
        be made on what lies below the mount.
        """

    @abstractmethod
    def add_folder(self, path: Location, *, exist_ok: bool = False) -> None:
        """Make one folder, not durable yet.

        Raises StorageError with EEXIST if something has the path; with ``exist_ok``, with ENOTDIR if no folder has it.
        """

    def set_changed(self, path: Location, changed: int) -> None:
        """Let a file have been changed last at a time, as :attr:`Entry.changed`, where the store keeps such times."""
        del path, changed

    @abstractmethod
    def sync_folder(self, path: Location) -> None:
        """Put the names in a folder on stable storage."""

    @abstractmethod
    def rename(self, source: Location, target: Location) -> None:
        """Rename a file or a folder. A file replaces a file, a folder an empty folder."""

    @abstractmethod
    def rename_new(self, source: Location, target: Location) -> None:
        """Rename a file to a path that nothing has; raises StorageError with EEXIST where something has it."""

    @abstractmethod
    def remove(self, path: Location, *, missing_ok: bool = False, operation: str = "remove") -> None:
        """Remove a file or a link.

        Args:
            path: The file.
            missing_ok: Whether it is no error if it is absent.
            operation: The operation that errors name.
        """

    @abstractmethod
    def remove_empty(self, folder: Location) -> None:
        """Remove an empty folder; raises StorageError with ENOTEMPTY if anything is in it."""

    @abstractmethod
    def remove_tree(self, folder: Location, *, tolerant: bool = False) -> None:
        """Remove a folder and everything in it. Others may add and remove entries meanwhile: that is no error.

        ``tolerant``: an entry that cannot be removed stays, without an error.
        """

    @abstractmethod
    def open_lock(self, path: Location, *, create: bytes | None = None, write: bool = True) -> Lock:
        """Open a file or a folder to lock it.

        Args:
            path: The file; a folder only without ``write``.
            create: Make the file if it is absent, and append this to it.
            write: Whether to open it for writing. NFS locks others out only of files that were opened so.
        """
