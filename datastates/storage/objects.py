"""The contract of a store: objects, which are bytes under locations. It knows no folders and no checkpoints.

A method that fails raises :class:`~datastates.errors.StorageError` with an error number, the operation and the
location: ENOENT for an object that is absent, EEXIST for one that is there, EACCES where the store refuses, 0 where no
number fits. Methods can be called from several threads at once.
"""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import Buffer

from datastates._base.tasks import each
from datastates.errors import StorageError
from datastates.storage.location import Location

ABSENT = (errno.ENOENT, errno.ESTALE)
"""The error numbers of a file that another process has deleted; the second one on NFS."""
AT_ONCE = 32
"""Requests to a store that are under way at once."""


class Entry(NamedTuple):
    """An object or a file, a folder, a link or another thing found at a location.

    Attributes:
        kind: ``"file"``, ``"folder"``, ``"link"`` or ``"other"``, such as a pipe. In a store of objects, an object is a
            file, and what only begins the names of objects is a folder.
        nbytes: The length of a file in bytes.
        changed: When its contents were last changed, in nanoseconds by the store's clock.
        version: Tells any change of a file.
        place: Tells two files apart, also where one of them has several paths. Empty in a store of objects.
    """

    kind: str
    nbytes: int
    changed: int
    version: Hashable
    place: tuple[int, ...] = ()


class Traits(NamedTuple):
    """The abilities of a store.

    Attributes:
        has_files: Whether the native core can open its locations as paths of files.
        best_piece: The most bytes in one request that the store is fast with. Restores ask for no more than a
            ``block`` at once, either.
    """

    has_files: bool = False
    best_piece: int = 8 << 20


class Writer(ABC):
    """A new object that is being written. Used by one thread at a time."""

    @abstractmethod
    def write(self, data: Any, offset: int) -> None:
        """Write bytes, a buffer with a length, at an offset in bytes: in a store of objects, where the last ended.

        The memory is the caller's again when this returns.
        """

    @abstractmethod
    def finish(self) -> None:
        """Put the object on stable storage, whole, and close it."""

    @abstractmethod
    def close(self) -> None:
        """Close it. One that is not finished is not there afterwards. Idempotent."""


class Store(ABC):
    """The contract of a store of objects."""

    traits = Traits()

    # --- looking

    @abstractmethod
    def look(self, path: Location) -> Entry | None:
        """Describe what is at a location; None for nothing."""

    @abstractmethod
    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, Entry]:
        """What lies below a location, by name, in any order: all that was made before this call, with its length.

        ``deep``: all objects below it, with names such as ``"a/b"``. Otherwise the first part of each name, once.
        """

    def names(self, folder: Location) -> list[str]:
        """The names that :meth:`entries` gives without ``deep``."""
        return [*self.entries(folder)]

    def numbers(self, folder: Location) -> dict[str, int]:
        """As :meth:`names`, each with a number that another thing under the same name has, too, only by chance."""
        return dict.fromkeys(self.names(folder), 0)

    def file(self, path: Location) -> Entry | None:
        """As :meth:`look`, where only an object or a file is looked for: what else is there may be None, too."""
        return self.look(path)

    def is_file(self, path: Location) -> bool:
        """Whether an object or a file is at a location, or a link to one."""
        return (entry := self.file(path)) is not None and entry.kind == "file"

    def is_folder(self, path: Location) -> bool:
        """Whether a folder is at a location, or a link to one."""
        return (entry := self.look(path)) is not None and entry.kind == "folder"

    def is_link(self, path: Location) -> bool:
        """Whether a link is at a location."""
        del path
        return False

    def exists(self, path: Location) -> bool:
        """Whether anything is at a location."""
        return self.look(path) is not None

    def length(self, path: Location) -> int:
        """The length of an object in bytes."""
        if (found := self.length_if_there(path)) is None:
            raise absent("stat", path)
        return found

    def length_if_there(self, path: Location) -> int | None:
        """The length of an object in bytes; None if nothing is there."""
        return None if (entry := self.file(path)) is None else entry.nbytes

    def lengths(self, paths: Sequence[Location]) -> list[int | None]:
        """As :meth:`length_if_there`, of many objects at once."""
        return each(self.length_if_there, paths, AT_ONCE)  # on shared storage each call takes long

    # --- reading

    @abstractmethod
    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        """Read ``nbytes`` bytes of an object at an offset. One that ends before the last of them is an error."""

    def read_into(self, path: Location, spans: Sequence[tuple[int, memoryview]]) -> None:
        """Read spans of an object, each an offset and the memory to fill, which is valid until this returns."""
        for offset, into in spans:
            into[:] = self.read(path, offset, len(into))

    def head(self, path: Location, most: int) -> bytes:
        """Read the beginning of an object: ``most`` bytes, or all of a shorter one."""
        return self.read(path, 0, min(self.length(path), most))

    def ending(self, path: Location, most: int, expected: int | None = None) -> tuple[int, bytes]:
        """The length of an object, and its last bytes: ``most``, or all of a shorter one.

        ``expected`` is the length that it should have, if that is known. It only saves a request.
        """
        del expected
        begin = max(0, (nbytes := self.length(path)) - most)
        return nbytes, self.read(path, begin, nbytes - begin)

    def read_all(self, path: Location, most: int | None = None) -> bytes:
        """Read a whole object. One of more than ``most`` bytes is an error, with EFBIG."""
        nbytes = self.length(path)
        if most is not None and nbytes > most:
            raise StorageError(errno.EFBIG, "read", str(path))
        return self.read(path, 0, nbytes)

    # --- writing

    @abstractmethod
    def create(self, path: Location, data: bytes) -> None:
        """Make an object, durable when this returns. Of several callers, it returns for one.

        Raises:
            UncertainError: The store did not tell whether the object was made, or may be made later: look at it.
            StorageError: With EEXIST, something is at the location: perhaps the object that this call has made, where
                an answer was lost. With another number, nothing was made.
        """

    @abstractmethod
    def replace(self, path: Location, data: bytes) -> None:
        """Make an object that appears at once with all its bytes, in place of an older one. It need not be durable."""

    @abstractmethod
    def writer(self, path: Location) -> Writer:
        """Begin to write a new object in pieces; raises StorageError with EEXIST, now or later, if one is there."""

    def upload(self, path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        """Make an object of pieces, which come as they are ready. It is durable when this returns.

        No other object has ever been at the location, and nobody else makes one there, unless of the same bytes. Where
        this raises, also what ``pieces`` raises, no object is made.

        Args:
            path: The location.
            pieces: The bytes, in the order of the object. Hold as few as possible: their memory is needed for others.
            nbytes: About the length of the object, in bytes.
        """
        del nbytes
        with contextlib.closing(self.writer(path)) as made:
            at = 0
            for piece in pieces:
                view = memoryview(piece)
                made.write(view, at)
                at += view.nbytes
            made.finish()

    def make_folder(self, path: Location) -> None:
        """Make a folder and missing folders above it, where there are folders."""
        del path

    def sync_folder(self, path: Location) -> None:
        """Put the names in a folder on stable storage, where they are not there with their objects."""
        del path

    @abstractmethod
    def discard(self, paths: Sequence[Location]) -> None:
        """Remove objects. It is no error if one is absent."""


def absent(operation: str, path: Location) -> StorageError:
    """The error of an operation on an object or a file that is absent."""
    return StorageError(errno.ENOENT, operation, str(path))
