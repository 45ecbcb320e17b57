"""Opens every container that the manifest of a checkpoint names."""

from __future__ import annotations

from collections.abc import Sequence

from datastates.commit import manifest
from datastates.commit.manifest import Manifest
from datastates.container.file import Container, Named, lost_container, open_each
from datastates.reading.head import Head
from datastates.storage.location import Location


def named_in(path: Location, opened: Manifest) -> list[Named]:
    """The containers that the manifest of a checkpoint directory names, by rank."""
    head = Head.of(path, opened)
    return [head.named(e.rank, e.file, e.nbytes, e.index_crc32) for e in opened.containers]


def open_named(named: Sequence[Named]) -> list[Container]:
    """Open containers, several at a time.

    Raises:
        FormatError: A file is damaged, or is not the container that ``named`` describes.
        StorageError: A file is missing or cannot be read.
    """
    containers = []
    for one, container in zip(named, open_each(named), strict=True):
        if container is None:
            raise lost_container(one.path, one.identity["rank"], one.identity["world_size"])
        containers.append(container)
    return containers


def open_checkpoint(path: Location) -> tuple[Manifest, list[Container]]:
    """Open a checkpoint directory: its manifest, and every container that it names.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        FormatError: A file is damaged, or is not the container that the manifest describes.
        StorageError: A file is missing or cannot be read.
    """
    opened = manifest.open(path)
    return opened, open_named(named_in(path, opened))
