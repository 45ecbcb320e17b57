"""The checkpoints of this package: a directory with a manifest, or one container file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from datastates.commit import health, manifest
from datastates.container import archive
from datastates.container.file import Container, Named
from datastates.container.pickle_reader import Trust
from datastates.errors import DatastatesError
from datastates.executor.executor import Executor
from datastates.formats.format import Problem
from datastates.formats.own_verify import verify_catalog, verify_container
from datastates.reading import whole_checkpoint
from datastates.reading.every_container import named_in, open_checkpoint, open_named
from datastates.reading.stored import Head, Stored
from datastates.state.new_memory import Into
from datastates.storage import store_of
from datastates.storage.location import Location

NAME = "a checkpoint of datastates"
_HEAD, _TAIL = 64, 4096
"""Bytes at the beginning and at the end of a file that are read to recognise a container."""


def has_ending(path: Location) -> bool:
    """Whether a file ends like a container, even a damaged one; raises StorageError."""
    tail = min(nbytes := store_of(path).length(path), _TAIL)
    return archive.is_ending(store_of(path).read(path, nbytes - tail, tail))


def has_beginning(path: Location) -> bool:
    """Whether a file begins like a container with records, even if it was cut short; raises StorageError."""
    return archive.is_beginning(store_of(path).head(path, _HEAD))


class OwnCheckpoint:
    """A checkpoint of this package, opened.

    Attributes:
        format: The name of its format.
        tensors: Its logical tensors.
    """

    format = NAME

    def __init__(self, path: Location) -> None:
        """Open a checkpoint directory by its manifest, or a container file.

        Raises:
            FormatError: The manifest or the file is damaged.
            StorageError: It cannot be read.
        """
        self._path = path
        self._manifest = None if store_of(path).is_file(path) else manifest.open(path)
        self.tensors = Stored.of_file(path) if self._manifest is None else Stored(Head.of(path, self._manifest))

    @cached_property
    def files(self) -> list[Container]:
        """All its containers, opened."""
        return self.tensors.every() if self._manifest is None else open_checkpoint(self._path)[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the containers and of the catalog."""
        if self._manifest is None:
            return self.files[0].nbytes
        return sum(nbytes for _, nbytes in manifest.files_of(self._path, self._manifest))

    @property
    def proof(self) -> str:
        """The end of a sentence for the user: every byte has a checksum, or follows from other bytes."""
        return "every byte is as written"

    def load(self, executor: Callable[[int], Executor], *, trust: Trust, into: Into) -> dict[str, Any]:
        """Read the whole checkpoint as :func:`datastates.reading.whole_checkpoint.load` does."""
        return whole_checkpoint.load(self.tensors, self.files, executor, trust=trust, into=into)

    def verify(self, progress: Callable[[int], object]) -> Iterator[Problem]:
        """Compare every byte with a checksum, or with the bytes that the rest of the checkpoint implies.

        All other files are compared even if one cannot be read, or is not the file that the manifest names.
        """
        if self._manifest is None:
            yield from verify_container(self.files[0], progress)
            return
        head: Head = self.tensors.head
        containers: list[Container] = []

        def container(named: Named) -> Iterator[Problem]:
            containers.extend(open_named([named]))
            yield from verify_container(containers[-1], progress)

        def catalog() -> Iterator[Problem]:
            if len(containers) == head.ranks:
                yield from verify_catalog(head, containers, progress)
            else:  # it can only be opened
                _ = self.tensors.catalog

        for named in named_in(self._path, self._manifest):
            yield from _naming(named.path, "the container", container(named))
        if head.catalog is not None:
            yield from _naming(self._path / head.catalog.file, "the catalog", catalog())


def _naming(path: Location, what: str, problems: Iterator[Problem]) -> Iterator[Problem]:
    """Yield the problems of a file. An error that keeps the file from being read becomes a problem, too."""
    try:
        yield from problems
    except DatastatesError as error:
        if not health.is_damage(error):
            raise
        yield Problem(path, what, f"cannot be read: {error}")


def recognises(path: Location) -> bool:
    """Whether a folder is a checkpoint, or a file a container, perhaps a damaged one."""
    if not store_of(path).is_file(path):
        return store_of(path).exists(path / manifest.FILE)
    return has_ending(path) or has_beginning(path)


def open(path: Location) -> OwnCheckpoint:
    """Open a checkpoint directory or a container file."""
    return OwnCheckpoint(path)
