"""Finds the tier of a place."""

from __future__ import annotations

import re

from datastates.commit.directory_tier import DirectoryTier
from datastates.commit.names import stem_of_partial
from datastates.commit.object_tier import ObjectTier
from datastates.commit.tier import Tier
from datastates.storage import Folders, store_of
from datastates.storage.location import Location


def tier_of(root: Location) -> Tier:
    """The tier of a place in any store; raises ValueError for an address that no store serves."""
    return DirectoryTier(root) if isinstance(store_of(root), Folders) else ObjectTier(root)


def sweep_beside(target: Location) -> None:
    """Delete the debris of interrupted writes of the path ``target``, as :meth:`Tier.sweep` does.

    In a store of objects, a name that a user has given is never swept.
    """
    if isinstance(tier := tier_of(target.parent), DirectoryTier):
        tier.sweep(re.compile(re.escape(stem_of_partial(target.name)) + r"\Z"))
