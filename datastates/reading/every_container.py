"""Opens every container that the manifest of a checkpoint names."""

from __future__ import annotations

from datastates.commit import manifest
from datastates.commit.manifest import Manifest, named_in
from datastates.container.file import Container, open_named
from datastates.storage.location import Location


def open_checkpoint(path: Location) -> tuple[Manifest, list[Container]]:
    """Open a checkpoint directory: its manifest, and every container that it names.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        FormatError: A file is damaged, or is not the container that the manifest describes.
        StorageError: A file is missing or cannot be read.
    """
    opened = manifest.open(path)
    return opened, open_named(named_in(path, opened))
