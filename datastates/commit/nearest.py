"""The checkpoints of several tiers as one listing: of those that lie in more than one, the nearest whole copy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from typing_extensions import override

from datastates._base import log
from datastates.commit import health
from datastates.commit.tier import Committed, Listing, Tier
from datastates.storage.location import Location


class Nearest(Listing):
    """Lists and protects the checkpoints of tiers, the nearest tier first. Thread-safe.

    Attributes:
        root: The place of the nearest tier.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Remember the tiers, the nearest one first."""
        super().__init__(tiers[0].root)
        self._tiers = tiers

    @override
    def checkpoints(self, *, certain: bool = False, known: bool = False) -> list[Committed]:
        """As :meth:`Tier.checkpoints`, of all tiers; each once. Raises StorageError if a tier cannot be listed.

        The order of one checkpoint among the others is that of its copy with the highest sequence number.
        """
        copies: dict[tuple[int, str], list[Committed]] = {}
        found: list[Committed] = []
        for tier in self._tiers:
            for one in tier.checkpoints(certain=certain, known=known):
                if one.sequence is None:
                    found.append(one)
                else:
                    copies.setdefault((one.step, one.attempt), []).append(one)
        for some in copies.values():
            found.append(_whole(some)._replace(sequence=max(one.sequence or 0 for one in some)))
        return sorted(found, key=lambda one: one.path)

    @override
    def protect(self, path: Location) -> contextlib.AbstractContextManager[None]:
        return next(tier for tier in self._tiers if tier.root == path.parent).protect(path)


def _whole(copies: Sequence[Committed]) -> Committed:
    """The first copy that looks whole; the first one if none does, or there is only one."""
    for one in copies[:-1]:
        if (problem := health.problem(one.path)) is None:
            return one
        log.warning("%s is read from another place, as it is damaged here: %s", one.path, problem)
    return copies[-1] if len(copies) == 1 or health.problem(copies[-1].path) is None else copies[0]
