"""How many bytes the checkpoints of one directory share, by where their files lie on the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from datastates.commit import manifest
from datastates.commit.manifest import is_kept
from datastates.commit.newest import by_age
from datastates.commit.tiers import tier_of
from datastates.errors import DatastatesError, StorageError
from datastates.storage import Folders, store_of
from datastates.storage.extents import Extent, shared_nbytes
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT


class SharedFile(NamedTuple):
    """A file of a checkpoint, which others may have, too.

    Attributes:
        place: The same for each name of one file.
        nbytes: Its length.
        extents: Its extents that other files have, too.
    """

    place: object
    nbytes: int
    extents: Sequence[Extent]


Shared: TypeAlias = Mapping[str, SharedFile]
"""The files of a checkpoint that are here, by name."""


def shared_files(path: Location) -> Shared | None:
    """What a checkpoint may share; None where the storage does not tell.

    Raises:
        CheckpointNotFoundError, FormatError, StorageError: It cannot be read.
    """
    store, found, is_told = store_of(path), {}, True
    for file, nbytes in manifest.files_of(path, manifest.open(path)):
        if not isinstance(store, Folders):
            found[file.name] = SharedFile(file, nbytes, ())  # an object shares nothing but itself
            continue
        try:
            extents, entry = store.extents(file), store.look(file)
        except StorageError as error:
            if error.errno in ABSENT:  # on another host, or lost
                continue
            raise
        is_told &= extents is not None
        if entry is not None:
            found[file.name] = SharedFile(entry.place, nbytes, [one for one in extents or () if one.is_shared])
    # where there are kept containers, files share no ranges
    return found if is_told or any(map(is_kept, found)) else None


def common_nbytes(own: Shared, others: Sequence[Shared]) -> int:
    """Bytes of a checkpoint that files of the same name in others have, too."""
    total = 0
    for name, file in own.items():
        alike = [one[name] for one in others if name in one]
        is_one = any(other.place == file.place for other in alike)
        total += file.nbytes if is_one else shared_nbytes(file.extents, [other.extents for other in alike])
    return total


def shared_with(path: Location) -> dict[int, int]:
    """Bytes that a checkpoint shares with each other one in its directory, by step; only those that share some."""
    found: dict[int, int] = {}
    with contextlib.suppress(DatastatesError):  # it is a file, or stands elsewhere
        known = shared_files(path)
        if known is None or not any(file.extents or is_kept(name) for name, file in known.items()):
            return {}
        attempt = manifest.open(path).attempt
        for step, other in by_age(tier_of(path.parent)).items():
            with contextlib.suppress(DatastatesError):  # it was deleted meanwhile, or is damaged
                theirs = None if manifest.open(other).attempt == attempt else shared_files(other)
                nbytes = 0 if theirs is None else common_nbytes(known, [theirs])
                found |= {step: nbytes} if nbytes else {}
    return found
