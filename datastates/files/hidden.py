"""Files and folders that are written in hidden folders, beside their final paths, until they get these."""

from __future__ import annotations

import re
from collections.abc import Iterable

from datastates.commit.names import HIDDEN, hidden
from datastates.commit.pending import Pending, publish_files
from datastates.commit.tiers import tier_of
from datastates.storage import Location
from datastates.storage.location import PathLike


class HiddenFile(Pending):
    """A file in a hidden folder of its own.

    Attributes:
        final: Its final path.
        written: The path to write to.
    """

    def __init__(self, final: PathLike, *, room: PathLike | None = None, name: str | None = None) -> None:
        """Plan a file; nothing is made yet.

        Args:
            final: The final path.
            room: The folder that holds the hidden one, on the same file system; by default that of ``final``.
            name: The file's name until then; by default its final one.
        """
        self.final = Location(final)
        super().__init__(hidden((self.final.parent if room is None else Location(room)) / self.final.name))
        self.written = self.file(name or self.final.name)


class HiddenFolder(Pending):
    """A folder that all ranks write into, in a hidden one, so that whoever is handed its path sees its final name.

    Attributes:
        written: The folder to write into.
    """

    def __init__(self, name: str, room: PathLike, attempt: str) -> None:
        """Plan a folder of a name, in ``room``; ``attempt`` is a name of 8 hexadecimal digits that all ranks share."""
        super().__init__(hidden(Location(room) / name), attempt)
        self.written = self.directory / name


def publish(files: Iterable[HiddenFile]) -> None:
    """Give written files their final names, one after the other, in place of files that have them, and sync that.

    Raises:
        StorageError: A file could not get its name, or the name may not survive a power failure.
    """
    publish_files([(file.written, file.final) for file in files], replace=True)


def debris(room: PathLike, names: re.Pattern[str] = HIDDEN) -> list[Location]:
    """The hidden folders in a folder that no live process writes into."""
    return list(tier_of(Location(room)).debris(names))


def sweep(room: PathLike, names: re.Pattern[str] = HIDDEN) -> None:
    """Remove :func:`debris`; raises OSError."""
    tier_of(Location(room)).sweep(names)
