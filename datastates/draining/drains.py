"""The further tiers of a run, in order: what waits to be brought to a later one stays where it lies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from datastates.commit.names import Identity
from datastates.commit.tier import Committed, Tier
from datastates.draining.drain import Around, Drain
from datastates.kept import Keep
from datastates.ranks.world import World
from datastates.storage.location import Location

UNTOLD = 30.0
"""Seconds for the newest checkpoint after SIGTERM, where nobody said how long the process has."""
_REPORTED = 1000
"""Checkpoints of a run, the newest, whose reports tell the further tiers."""
_IN_MEMORY = 2
"""Checkpoints that stay in memory until a later tier has them."""


class Drains:
    """Brings the checkpoints of a run into its further tiers. Thread-safe."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        further: Sequence[Keep],
        world: World,
        *,
        is_busy: Callable[[], bool],
        delete: Callable[[], None],
        restored: Callable[[], Location | None],
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            tiers: All tiers, the one that the run commits to first.
            further: The checkpoints that each of the others keeps.
            world: The ranks.
            is_busy: Whether a snapshot is in flight.
            delete: Deletes the checkpoints of the first tier that are not kept.
            restored: Returns the checkpoint that stays after a roll-back; it may lie in any tier.
        """
        self._delete, self._restored = delete, restored
        self._in_memory = tiers[0].in_memory
        self._every: list[Drain] = []
        self._own: dict[Location, Identity] = {}  # the newest of this run, the oldest first
        for number, (tier, keep) in enumerate(zip(tiers[1:], further, strict=True), 1):
            leads, stay = world.rank == tiers[0].leader, partial(self._stay_in, number)
            around = Around(world.rank, leads, world.timeout, stay, partial(self._free, number))
            self._every.append(Drain(tiers[:number], tier, keep, around, is_busy))

    def begin(self) -> None:
        """Begin to ask the tiers what they have: the run begins to save."""
        for drain in self._every:
            drain.begin()

    def add(self, path: Location, identity: Identity) -> None:
        """Note a checkpoint of this run: it is committed in the first tier."""
        if self._every:
            self._own[path] = identity
            for outlived in list(self._own)[:-_REPORTED]:
                self._own.pop(outlived, None)
        for drain in self._every:
            drain.add(path)

    def places(self, path: Location) -> list[Location]:
        """The tiers that have a checkpoint of this run by now, by its path in the first one; known on rank 0 only."""
        identity = self._own.get(path)
        further = (
            [] if identity is None else [drain.target.root for drain in self._every if drain.backlog.has(identity)]
        )
        return [path.parent, *further]

    def newest(self) -> int:
        """A number above which new checkpoints are newer than all in the further tiers; see :meth:`Drain.newest`."""
        self.begin()
        return max((drain.newest() for drain in self._every), default=0)

    def stay(self, every: Sequence[Committed]) -> list[Location]:
        """The checkpoints of the first tier that a later tier still needs, and that no tier in between has.

        Of a tier in memory, only the newest few: what comes too fast for the later tiers must not fill it.
        """
        newest_first = sorted(every, key=lambda one: one.sequence or 0, reverse=True)
        return self._stay_in(0, newest_first)[: _IN_MEMORY if self._in_memory else None]

    def _stay_in(self, number: int, every: Sequence[Committed]) -> list[Location]:
        rolled_back = self._restored() if number else None  # the first tier's run keeps its own
        return [one.path for one in every if one.path == rolled_back or self._must_stay(one, self._every[number:])]

    def _must_stay(self, one: Committed, later: Sequence[Drain]) -> bool:
        for drain in later:
            if drain.backlog.has((one.step, one.attempt)):
                return False
            if drain.needs(one):
                return True
        return False

    def _free(self, number: int) -> None:
        """Delete what earlier tiers than that of a number need to keep no more."""
        self._delete()
        for drain in self._every[: number - 1]:
            drain.delete()

    def wait(self, timeout: float | None = None) -> str:
        """Wait until nothing is due; after ``timeout`` seconds, says what is not done and why, else nothing.

        Raises:
            FencedError: A newer run has begun to save in a further tier.
        """
        end = None if timeout is None else time.monotonic() + timeout
        left = [one for one in self._every if not one.wait(None if end is None else max(0.0, end - time.monotonic()))]
        return "; ".join(f"{one.target.root}{': ' * bool(one.failure)}{one.failure}" for one in left)

    def hurry(self, end: float | None) -> None:
        """Bring the newest checkpoint of this run only. Waits for that; what was dropped goes on later.

        ``end``: when to give up, in seconds on the monotonic clock. None: that is not known.
        """
        end = time.monotonic() + UNTOLD if end is None else end
        for drain in self._every:
            drain.hurry()
        try:
            for drain in self._every:
                drain.wait_hurried(max(0.0, end - time.monotonic()))
        finally:
            for drain in self._every:
                drain.go_on()

    def close(self) -> None:
        """Bring what is due, and end; see :meth:`Drain.close`."""
        for drain in self._every:
            drain.close()
