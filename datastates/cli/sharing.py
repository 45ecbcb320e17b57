"""How many bytes the checkpoints of one directory share, by where their files lie on the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from datastates.commit import manifest
from datastates.commit.newest import by_age
from datastates.commit.tiers import tier_of
from datastates.errors import DatastatesError, StorageError
from datastates.storage import Folders, store_of
from datastates.storage.extents import Extent, shared_nbytes
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT

Shared: TypeAlias = Mapping[str, Sequence[Extent]]
"""For each file of a checkpoint that is here, by name, the extents that other files have, too."""


def shared_extents(path: Location) -> tuple[Shared, int] | None:
    """What a checkpoint shares, and the bytes of its files that are here; None where the storage does not tell.

    Raises:
        CheckpointNotFoundError, FormatError, StorageError: It cannot be read.
    """
    store, found, total = store_of(path), {}, 0
    if not isinstance(store, Folders):
        return None
    for file, nbytes in manifest.files_of(path, manifest.open(path)):
        try:
            extents = store.extents(file)
        except StorageError as error:
            if error.errno in ABSENT:  # on another host, or lost
                continue
            raise
        if extents is None:
            return None
        found[file.name] = [extent for extent in extents if extent.is_shared]
        total += nbytes
    return found, total


def common_nbytes(own: Shared, others: Sequence[Shared]) -> int:
    """Bytes of a checkpoint that files of the same name in others have, too."""
    return sum(shared_nbytes(extents, [one[name] for one in others if name in one]) for name, extents in own.items())


def shared_with(path: Location) -> dict[int, int]:
    """Bytes that a checkpoint shares with each other one in its directory, by step; only those that share some."""
    found: dict[int, int] = {}
    with contextlib.suppress(DatastatesError):  # it is a file, or stands elsewhere
        known = shared_extents(path)
        if known is None or not any(known[0].values()):
            return {}
        attempt = manifest.open(path).attempt
        for step, other in by_age(tier_of(path.parent)).items():
            with contextlib.suppress(DatastatesError):  # it was deleted meanwhile, or is damaged
                theirs = None if manifest.open(other).attempt == attempt else shared_extents(other)
                nbytes = 0 if theirs is None else common_nbytes(known[0], [theirs[0]])
                found |= {step: nbytes} if nbytes else {}
    return found
