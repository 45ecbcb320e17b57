"""Where a run saves: its tiers, and its right to save in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from datastates._base import log
from datastates.commit.ballot import Ballot
from datastates.commit.directory_tier import DirectoryTier
from datastates.commit.names import Identity
from datastates.commit.nearest import Nearest
from datastates.commit.opening import Opening
from datastates.commit.run import Run
from datastates.commit.spread_ballot import SpreadBallot
from datastates.commit.spread_opening import open_spread
from datastates.commit.spread_tier import SpreadTier
from datastates.commit.tier import Committed, Listing, Tier
from datastates.commit.tiers import tier_of
from datastates.config import Settings
from datastates.draining.drains import UNTOLD, Drains
from datastates.draining.peers import Peers
from datastates.errors import SettingsError, StorageError
from datastates.ranks.world import World, meet
from datastates.saving.snapshot import Snapshot
from datastates.storage import Folders, store_of
from datastates.storage.location import Face, Location, PathLike


class Place:
    """The tiers of a run as one rank knows them. Thread-safe, once it is opened.

    Attributes:
        root: The place that the run commits to.
        listing: The checkpoints of all tiers.
        opening: The right to save in the first tier.
        run: The saves in the first tier.
        drains: Bring the checkpoints into the other tiers.
        peers: Keeps copies on other hosts; None without the setting.
        ballot: What makes a checkpoint in the first tier.
    """

    opening: Opening
    run: Run
    drains: Drains
    peers: Peers | None = None
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
            SettingsError: ``peers`` is set, and the ranks do not meet through torch.distributed.
        """
        has_peers, link = bool(self._settings.peers), None if world.place is None else world.place.link
        if has_peers and world.size > 1 and link is None:
            raise SettingsError("peers: copies go through torch.distributed: initialize it first")
        first, (keep, *further) = self._tiers[0], self._settings.keeps
        if (further or has_peers) and keep.last is None and first.in_memory:
            keep = replace(keep, last=1)
        beside = "".join(f", then {tier.root}" for tier in self._tiers[1:]) + ", with peers" * has_peers
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
            stay=self._stay if further or has_peers else None,
            committed=self._committed,
        )
        if isinstance(first, SpreadTier) and has_peers and link is not None:
            self.peers = Peers(first, self.run, world, link, is_busy)
        elif has_peers:
            log.warning("peers: no copies are kept, as there is one rank only")
        self.drains = Drains(
            self._tiers,
            further,
            world,
            is_busy=is_busy,
            delete=self.run.delete,
            restored=lambda: self.run.restored,
        )

    def _committed(self, path: Location, identity: Identity) -> None:
        self.drains.add(path, identity)
        if self.peers is not None:
            self.peers.note(path, identity)

    def _stay(self, every: Sequence[Committed]) -> list[Location]:
        """What other tiers and hosts still need of the first tier."""
        return self.drains.stay(every) + ([] if self.peers is None else self.peers.stay(every))

    def ended(self, snapshot: Snapshot) -> None:
        """Copy the checkpoint of a snapshot that has ended to other hosts. Call it in the order of the snapshots."""
        if self.peers is not None and snapshot.committed:
            self.peers.add(Location(snapshot.path))

    def restored(self, path: Location, name: str) -> None:
        """Note the checkpoint that all ranks have restored, in the restore of a name."""
        self.run.restored = path
        if self.peers is not None:
            self.peers.add_restored(path, name)

    def places(self, path: Location) -> list[Face]:
        """Where a checkpoint of this run is by now, by its path in the first tier: the widest place comes last."""
        first, *further = [tier.face for tier in self.drains.places(path)]
        return [first, *["peers"] * (self.peers is not None and self.peers.has(path)), *further]

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the other tiers and hosts have all that is due; after ``timeout`` seconds, says what lacks.

        Raises:
            FencedError: A newer run has begun to save in a further tier.
        """
        end = None if timeout is None else time.monotonic() + timeout
        rest = [] if self.peers is None else [self.peers.wait(timeout)]
        rest.append(self.drains.wait(None if end is None else max(0.0, end - time.monotonic())))
        return "; ".join(filter(None, rest))

    def hurry(self, end: float | None) -> None:
        """As :meth:`Drains.hurry`; then wait for the copies on other hosts, which go on meanwhile."""
        self.drains.hurry(end)
        if self.peers is not None:
            self.peers.wait(UNTOLD if end is None else max(0.0, end - time.monotonic()))

    def close(self, part: Callable[[], None]) -> None:
        """Bring what is due to the other tiers and hosts, and give up the right to save. Can be repeated.

        ``part`` is called once the ranks need not meet any more.
        """
        if self.peers is not None:
            self.peers.close()
        part()
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
