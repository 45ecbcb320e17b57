"""How many bytes the checkpoints of one directory share, by where their files lie on the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from datastates.commit import manifest
from datastates.commit.newest import by_age
from datastates.commit.tiers import tier_of
from datastates.errors import DatastatesError
from datastates.storage import Folders, store_of
from datastates.storage.extents import Extent, shared_nbytes
from datastates.storage.location import Location


def added_nbytes(path: Location, before: Sequence[Location]) -> int:
    """Bytes of a checkpoint that no checkpoint before it has in the same place.

    Args:
        path: The checkpoint.
        before: The checkpoints before it.

    Raises:
        CheckpointNotFoundError, FormatError, StorageError: It cannot be read.
    """
    own = _extents(path)
    others = [_extents(one) for one in before]
    nbytes = sum(nbytes for _, nbytes in manifest.files_of(path, manifest.open(path)))
    return nbytes - sum(_shared(name, extents, others) for name, extents in own.items())


def shared_with(path: Location) -> dict[int, int]:
    """Bytes that a checkpoint shares with each other one in its directory, by step; only those that share some."""
    found: dict[int, int] = {}
    with contextlib.suppress(DatastatesError):  # it is a file, or stands elsewhere
        own = _extents(path)
        for step, other in by_age(tier_of(path.parent)).items() if own else ():
            with contextlib.suppress(DatastatesError):  # it was deleted meanwhile, or is damaged
                theirs = [] if other == path else [_extents(other)]
                nbytes = sum(_shared(name, extents, theirs) for name, extents in own.items())
                found |= {step: nbytes} if nbytes else {}
    return found


def _shared(name: str, extents: Sequence[Extent], others: Sequence[dict[str, list[Extent]]]) -> int:
    return shared_nbytes(extents, [other[name] for other in others if name in other])


def _extents(path: Location) -> dict[str, list[Extent]]:
    """The extents of each file of a checkpoint, by name; empty where the storage does not tell."""
    store = store_of(path)
    if not isinstance(store, Folders):
        return {}
    files = [file for file, _ in manifest.files_of(path, manifest.open(path))]
    return {file.name: found for file in files if (found := store.extents(file)) is not None}
