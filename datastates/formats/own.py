"""The checkpoints of this package: a directory with a manifest, or one container file.

They are verified by checksums, or by the bytes that their other parts imply.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from datastates._base.cached import cached_property
from datastates._base.tasks import each
from datastates.commit import health, manifest
from datastates.commit.catalog import encode_catalog
from datastates.commit.claims import NO_CLAIMS, claims_of, describe_conflicts, whole_claims
from datastates.commit.manifest import named_in
from datastates.container import archive, every_byte
from datastates.container.file import Container, Named, open_named
from datastates.container.pickle_reader import Trust
from datastates.container.table import ShardTable
from datastates.errors import CheckpointNotFoundError, DatastatesError
from datastates.executor.executor import Executor
from datastates.formats.format import Problem
from datastates.formats.seen import Seen
from datastates.reading import whole_checkpoint
from datastates.reading.head import Head
from datastates.reading.stored import Stored
from datastates.state.new_memory import Into
from datastates.state.parts import Part, uncovered
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.objects import AT_ONCE

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
        self._manifest = None
        try:
            self._manifest = manifest.open(path)
        except CheckpointNotFoundError:
            if not store_of(path).is_file(path):
                raise
        self.tensors = Stored.of_file(path) if self._manifest is None else Stored(Head.of(path, self._manifest))

    @cached_property
    def files(self) -> list[Container]:
        """All its containers, opened."""
        if self._manifest is None:
            return self.tensors.every()
        return open_named(named_in(self._path, self._manifest))

    @property
    def metric(self) -> float | None:
        """How good it is, by its manifest; None without one."""
        return None if self._manifest is None else self._manifest.metric

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

    def verify(self, progress: Callable[[int], object], seen: set[Hashable] | None = None) -> Iterator[Problem]:
        """Compare every byte with a checksum, or with the bytes that the rest of the checkpoint implies.

        All other files are compared even if one cannot be read, or is not the file that the manifest names. What
        ``seen`` has of kept containers is not read again; those without a problem are added.
        """
        if self._manifest is None:
            yield from verify_container(self.files[0], progress)
            return
        head: Head = self.tensors.head
        containers: list[Container] = []
        every, numbers = named_in(self._path, self._manifest), self._manifest.numbers

        def container(opened: Container | DatastatesError) -> Iterator[Problem]:
            if isinstance(opened, DatastatesError):
                raise opened
            containers.append(opened)
            place = _place(opened) if seen is not None else None
            if seen is not None and place in seen:
                progress(opened.nbytes)
                return
            is_whole = True
            for problem in verify_container(opened, progress):
                is_whole = False
                yield problem
            if seen is not None and is_whole and place is not None:
                seen.add(place)

        def catalog() -> Iterator[Problem]:
            if len(containers) == len(every):
                numbered = dict(zip(numbers, containers, strict=True))
                yield from verify_catalog(head, numbered, progress)
            else:  # it can only be opened
                _ = self.tensors.catalog

        for named, opened in zip(every, each(_try_to_open, every, AT_ONCE), strict=True):
            yield from _naming(named.path, "the container", container(opened))
        if len(containers) == len(every):
            vars(self)["files"] = containers
        if head.catalog is not None:
            yield from _naming(self._path / head.catalog.file, "the catalog", catalog())


def _place(container: Container) -> Hashable:
    """Tells a kept container from all other files, also where it has several names; None for another one."""
    entry = store_of(container.path).look(container.path) if manifest.is_kept(container.path.name) else None
    return None if entry is None else (entry.place or container.path, container.index_crc)


def _try_to_open(named: Named) -> Container | DatastatesError:
    try:
        return open_named([named])[0]
    except DatastatesError as error:
        return error


def _naming(path: Location, what: str, problems: Iterator[Problem]) -> Iterator[Problem]:
    """Yield the problems of a file. An error that keeps the file from being read becomes a problem, too."""
    try:
        yield from problems
    except DatastatesError as error:
        if not health.is_damage(error):
            raise
        yield Problem(path, what, f"cannot be read: {error}")


def recognises(seen: Seen) -> bool:
    """Whether a folder is a checkpoint, or a file a container, perhaps a damaged one."""
    if seen.has_manifest or not seen.is_file:
        return seen.has_manifest
    return archive.is_ending(seen.ending(_TAIL)) or archive.is_beginning(seen.beginning[:_HEAD])


def open(path: Location) -> OwnCheckpoint:
    """Open a checkpoint directory or a container file."""
    return OwnCheckpoint(path)


def verify_container(source: Container, progress: Callable[[int], object]) -> Iterator[Problem]:
    """Read every byte of a container, and compare it with its checksum or with the byte that the index implies.

    ``progress`` is called with the number of bytes after each read.
    """
    found: list[Problem] = []
    for data in every_byte.read(source, lambda key, what: found.append(Problem(source.path, key, what))):
        progress(len(data))
        yield from found
        found.clear()
    for key in _overlapping(source.index.shards):
        yield Problem(source.path, key, "has parts that overlap")


def verify_catalog(
    head: Head, containers: Mapping[int, Container], progress: Callable[[int], object]
) -> Iterator[Problem]:
    """Compare every byte of a checkpoint's catalog with the catalog that its containers imply.

    Args:
        head: The head of the checkpoint.
        containers: All containers, by number.
        progress: Called with the number of bytes after each read.
    """
    assert head.catalog is not None
    path, entry = head.path / head.catalog.file, head.catalog
    text = describe_conflicts((number % head.ranks, one.index.shards) for number, one in containers.items())
    if text is not None:
        yield Problem(path, "the containers", f"do not make one state: {text}")
        return
    every = [containers.get(number) for number in range(head.containers)]
    claims = [NO_CLAIMS if one is None else whole_claims(claims_of(one.index.shards), one.index) for one in every]
    nbytes = np.array([one.nbytes if one else 0 for one in every], np.uint64)
    index_crc = np.array([one.index_crc if one else 0 for one in every], np.uint32)
    expected, head_crc = encode_catalog(claims, nbytes, index_crc)
    data = store_of(path).read_all(path)
    progress(len(data))
    if data != expected:
        at = every_byte.first_difference(data, expected)
        yield Problem(path, f"the catalog at byte {at}", "is not what the containers make of it")
    elif (len(data), head_crc) != (entry.nbytes, entry.head_crc32):
        yield Problem(path, "the catalog", "is not the one that the manifest names")


def _overlapping(table: ShardTable) -> Iterator[str]:
    """Full keys of tensors with two parts in one container that have an element in common."""
    for rows in table.repeated():
        whole, parts = Part.whole(rows[0].global_shape), [row.part for row in rows]
        if sum(part.numel for part in parts) + uncovered(whole, parts) > whole.numel:
            yield rows[0].key
