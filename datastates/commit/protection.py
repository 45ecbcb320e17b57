"""Protects a checkpoint from deletion while it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from datastates.commit import newest
from datastates.commit.tier import ReadableTier
from datastates.errors import CheckpointNotFoundError
from datastates.storage import store_of
from datastates.storage.location import Location


def keep(tier: ReadableTier, find: Callable[[], Location | None], reader: contextlib.ExitStack) -> Location | None:
    """Keep the checkpoint of a tier that ``find`` returns from deletion until ``reader`` closes.

    If it is deleted before it can be kept, ``find`` is called again. Returns None if ``find`` does.
    """
    while (path := find()) is not None:
        try:
            reader.enter_context(tier.protect(path))
            break
        except CheckpointNotFoundError:
            if path == find():
                raise
    return path


@contextlib.contextmanager
def kept(path: Location, step: int | None = None) -> Iterator[Location]:
    """Yield ``path`` if it is a file, else the checkpoint that it means, kept from deletion meanwhile."""
    if store_of(path).is_file(path):
        yield path
        return
    place = newest.given(path)
    with contextlib.ExitStack() as reader:
        found = keep(place.tier, lambda: newest.find(place, step), reader)
        assert found is not None
        yield found
