"""The checkpoints of several tiers as one listing: of those that lie in more than one, the nearest copy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from typing_extensions import override

from datastates._base import log
from datastates.commit.gathering import Gathering
from datastates.commit.tier import Committed, Listing, Tier
from datastates.storage import Folders, store_of
from datastates.storage.location import Location


class Nearest(Listing):
    """Lists and protects the checkpoints of tiers, the nearest tier first. Thread-safe.

    Attributes:
        root: The place of the nearest tier.
        highest: The highest sequence number that was listed; 0 before that.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Remember the tiers, the nearest one first."""
        super().__init__(tiers[0].root)
        self._tiers = tiers
        self._copies: dict[Location, list[Location]] = {}

    @override
    def checkpoints(self, *, certain: bool = False, known: bool = False) -> list[Committed]:
        """As :meth:`Tier.checkpoints`, of all tiers; each once. Raises StorageError if a tier cannot be listed.

        The order of one checkpoint among the others is that of its copy with the highest sequence number.
        """
        copies: dict[tuple[int, str], list[Committed]] = {}
        unreadable: list[Committed] = []
        listed = [tier.checkpoints(certain=certain, known=known) for tier in self._tiers]
        for tier, every in zip(self._tiers, listed, strict=True):
            if not every and any(listed):
                _warn_if_absent(tier.root)
            for one in every:
                if one.sequence is None:
                    unreadable.append(one)
                else:
                    copies.setdefault((one.step, one.attempt), []).append(one)
        for some in copies.values():  # what only other hosts have comes last
            some.sort(key=lambda one: not self._tier_of(one.path).lies_here(one.path))
        self._copies = {some[0].path: [one.path for one in some] for some in copies.values()}
        newest = [some[0]._replace(sequence=max(one.sequence or 0 for one in some)) for some in copies.values()]
        self.highest = max([self.highest, *(one.sequence or 0 for one in newest)])
        return sorted([*newest, *unreadable], key=lambda one: one.path)

    @override
    def copies(self, path: Location) -> list[Location]:
        return self._copies.get(path, [path])

    @override
    def protect(self, path: Location) -> contextlib.AbstractContextManager[None]:
        return self._tier_of(path).protect(path)

    @override
    def here(self, path: Location, step: int, attempt: str) -> Location:
        return self._tier_of(path).here(path, step, attempt)

    @override
    def gathering(self) -> Gathering | None:
        return self._tiers[0].gathering()

    @override
    def has_seen(self, path: Location) -> bool:
        return self._tier_of(path).has_seen(path)

    def _tier_of(self, path: Location) -> Tier:
        """The tier that a checkpoint lies in: the first one may have another path on each host."""
        return next((tier for tier in self._tiers if tier.root == path.parent), self._tiers[0])


def _warn_if_absent(root: Location) -> None:
    """Warn of a directory that is not there: if its disk is not mounted, the newest checkpoint may be missed."""
    store = store_of(root)
    if isinstance(store, Folders) and not store.exists(root):
        log.warning("%s is not there, and counts as empty: is its disk mounted?", root)
