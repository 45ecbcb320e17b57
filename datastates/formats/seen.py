"""What lies at a path, looked at once: a call passes on what it has found there."""

from __future__ import annotations

from datastates._base.cached import cached_property
from datastates.commit import directories, manifest
from datastates.storage import Entry, store_of
from datastates.storage.location import Location

_BEGINNING = 1024
"""Bytes at the beginning of a file that tell most formats."""


class Seen:
    """What lies at a path. Each look is made when it is first needed, and kept; any may raise StorageError.

    Attributes:
        path: The path.
    """

    def __init__(self, path: Location) -> None:
        """Take the path; nothing is looked at yet."""
        self.path = path
        self._store = store_of(path)

    @cached_property
    def has_manifest(self) -> bool:
        """Whether it is a folder that is a checkpoint of this package."""
        return manifest.look(self.path) is not None

    @cached_property
    def names(self) -> list[str]:
        """The names in a folder, sorted; none at a file. A checkpoint of this package may have very many."""
        return sorted(self._store.names(self.path))

    @cached_property
    def is_root(self) -> bool:
        """Whether it is a directory of this package's checkpoints: one with a committed checkpoint in it."""
        return directories.is_root(self.path, self.names)

    @cached_property
    def _entry(self) -> Entry | None:
        """What it is, if that cannot be told from its names."""
        return None if self.has_manifest or self.names else self._store.look(self.path)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, or a link to one."""
        return self.has_manifest or bool(self.names) or (self._entry is not None and self._entry.kind == "folder")

    @property
    def is_file(self) -> bool:
        """Whether it is a file, or a link to one."""
        return self._entry is not None and self._entry.kind == "file"

    @property
    def nbytes(self) -> int:
        """The length of a file in bytes."""
        assert self._entry is not None
        return self._entry.nbytes

    def has(self, name: str) -> bool:
        """Whether a folder has a file of this name."""
        return name in self.names and self._store.is_file(self.path / name)

    @cached_property
    def beginning(self) -> bytes:
        """The first bytes of a file, about a thousand."""
        return self._store.read(self.path, 0, min(self.nbytes, _BEGINNING))

    def ending(self, most: int) -> bytes:
        """The last bytes of a file: ``most``, or all of a shorter one."""
        tail = min(self.nbytes, most)
        return self._store.read(self.path, self.nbytes - tail, tail)
