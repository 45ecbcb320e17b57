"""Where a run saves: its tiers, and its right to save in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from datastates.commit.ballot import Ballot
from datastates.commit.directory_tier import DirectoryTier
from datastates.commit.nearest import Nearest
from datastates.commit.opening import Opening
from datastates.commit.run import Run
from datastates.commit.spread_ballot import SpreadBallot
from datastates.commit.spread_tier import open_spread
from datastates.commit.tier import Listing, Tier
from datastates.commit.tiers import tier_of
from datastates.config import Settings
from datastates.draining.drains import Drains
from datastates.errors import SettingsError, StorageError
from datastates.ranks.world import World, meet
from datastates.storage import Folders, store_of
from datastates.storage.location import Location, PathLike


class Place:
    """The tiers of a run as one rank knows them. Thread-safe, once it is opened.

    Attributes:
        root: The place that the run commits to.
        listing: The checkpoints of all tiers.
        opening: The right to save in the first tier.
        run: The saves in the first tier.
        drains: Bring the checkpoints into the other tiers.
        ballot: What makes a checkpoint in the first tier.
    """

    opening: Opening
    run: Run
    drains: Drains
    ballot: type[Ballot] = Ballot

    def __init__(self, root: Location, settings: Settings) -> None:
        """Make the place, where it needs to be made.

        Raises:
            SettingsError: A tier is given twice, or no store serves it. Or ``per_host`` is set for a bucket.
            StorageError: The place cannot be made.
            ValueError: No store serves it.
        """
        self.root = root
        self._settings = settings
        self._tiers = [tier_of(root)]
        if settings.per_host and not isinstance(self._tiers[0], DirectoryTier):
            raise SettingsError(f"per_host: {root} is a place in a store, which all hosts share")
        for one in settings.tiers:
            self._tiers.append(self._further(one.path))
        self.listing: Listing = Nearest(self._tiers) if settings.tiers else self._tiers[0]
        self._tiers[0].make()

    def _further(self, path: PathLike) -> Tier:
        try:
            tier = tier_of(Location.of(path))
        except (TypeError, ValueError) as error:
            raise SettingsError(f"tiers: {error}") from error
        for other in self._tiers:
            if tier.root == other.root or _is_same(tier.root, other.root):
                raise SettingsError(f"tiers: {tier.root} is given twice")
            if tier.root.is_relative_to(other.root) or other.root.is_relative_to(tier.root):
                raise SettingsError(f"tiers: {tier.root} and {other.root} lie in one another")
        return tier

    def open(self, world: World, name: str, is_busy: Callable[[], bool]) -> None:
        """Open it with all ranks.

        Args:
            world: The ranks.
            name: The name of the agreement, the same on all ranks.
            is_busy: Whether a snapshot of the run is in flight.

        Raises:
            CommitError, RanksMissingError: As :func:`meet` does.
        """
        first, (keep, *further) = self._tiers[0], self._settings.keeps
        if further and keep.last is None and first.in_memory:
            keep = replace(keep, last=1)
        beside = "".join(f", then {tier.root}" for tier in self._tiers[1:])
        if world.size == 1 or not self._settings.per_host:
            self.opening = first.opening(meet(world, name, f"{self.root}{beside}", first.begin_opening))
        else:
            first, self.opening = open_spread(world, name, self.root, beside)
            self.ballot, self._tiers[0] = SpreadBallot, first
            self.listing = self.listing if further else first
        self.run = Run(
            first,
            self.opening,
            keep,
            is_coordinator=world.rank == first.leader,
            above=lambda: max(self.drains.newest(), self.listing.highest, first.highest),
            stay=(lambda every: self.drains.stay(every)) if further else None,
            committed=lambda path, identity: self.drains.add(path, identity),
        )
        self.drains = Drains(
            self._tiers,
            further,
            world,
            is_busy=is_busy,
            delete=self.run.delete,
            restored=lambda: self.run.restored,
        )

    def close(self) -> None:
        """Bring what is due to the other tiers, and give up the right to save. Can be repeated."""
        self.drains.close()
        self.opening.close()


def _is_same(one: Location, other: Location) -> bool:
    """Whether two paths lead to one folder, as through a link."""
    if not (isinstance(store_of(one), Folders) and isinstance(store_of(other), Folders)):
        return False
    try:
        found, others = store_of(one).look(one), store_of(other).look(other)
    except StorageError:  # a further place that fails stops nobody
        return False
    return found is not None and others is not None and found.place == others.place
