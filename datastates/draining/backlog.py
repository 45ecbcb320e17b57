"""What is still to be brought to a tier: it follows from the lists of the tiers, so that a kill loses nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from datastates.commit import retention
from datastates.commit.names import Identity, step_name
from datastates.commit.tier import Committed, Tier, Uncommitted
from datastates.kept import Keep
from datastates.storage.location import Location


class Backlog:
    """The checkpoints that a tier lacks and would keep. One thread brings them; any thread may ask.

    Attributes:
        newest: The highest sequence number that the tier had when it was asked first; None before that.
    """

    newest: int | None = None

    def __init__(self, before: Sequence[Tier], target: Tier, keep: Keep) -> None:
        """Nothing is read yet; arguments as for :class:`~datastates.draining.drain.Drain`."""
        self._before, self._target, self._keep = before, target, keep
        self._own: dict[Location, float] = {}  # what this run has committed and is due: numbers, as far as listed
        self._known: set[Identity] = set()  # what is in the target
        self._lost: set[Identity] = set()  # what is damaged wherever it lies, or gone
        self._unwanted: set[Identity] = set()  # what the target would not keep

    # --- what this run has committed

    def add(self, path: Location) -> None:
        """Note a checkpoint of this run, which is committed in the first tier."""
        self._own[path] = math.inf

    def is_own(self, path: Location) -> bool:
        """Whether a checkpoint is of this run, and due."""
        return path in self._own

    def own_newest(self) -> Location | None:
        """The newest checkpoint of this run that is due; it need not be the one that was committed last."""
        return max(reversed(list(self._own)), key=lambda path: self._own.get(path, 0), default=None)

    def drop(self, path: Location) -> None:
        """Forget a checkpoint of this run."""
        self._own.pop(path, None)

    def drop_outdated(self) -> None:
        """Forget what the target will not keep, as far as that follows from the checkpoints of this run."""
        own = [one for one in self._before[0].checkpoints(known=True) if one.path in self._own]
        self._own.update({one.path: one.sequence or 0 for one in own})
        for one in retention.outdated_of(own, self._keep, lambda one: True):
            self.drop(one.path)

    # --- what the tiers have

    def due(self) -> list[list[Committed]]:
        """What is to be brought, the newest first: each checkpoint as it lies in the tiers before the target.

        Raises:
            StorageError: A tier cannot be listed.
        """
        there = self._target.checkpoints(certain=True, known=True)
        self._known = {(one.step, one.attempt) for one in there}
        if self.newest is None:
            self.newest = max((one.sequence or 0 for one in there), default=0)
        found: dict[Identity, list[Committed]] = {}
        gone = set(self._own)  # taken before the lists: what is committed meanwhile may be in none
        for tier in self._before:
            for one in tier.checkpoints(known=True):
                gone.discard(one.path)
                if one.path in self._own:
                    self._own[one.path] = one.sequence or 0
                if one.sequence is not None and (one.step, one.attempt) not in self._known | self._lost:
                    found.setdefault((one.step, one.attempt), []).append(one)
        for path in gone:
            self.drop(path)
        arriving = [copies[0] for copies in found.values()]
        outdated = retention.outdated_of([*there, *arriving], self._keep, self._is_whole)
        self._unwanted = {(one.step, one.attempt) for one in outdated} & set(found)
        for identity in self._unwanted:
            self.drop(found[identity][0].path)
        due = [one for one in arriving if (one.step, one.attempt) not in self._unwanted]
        due.sort(key=lambda one: one.sequence or 0, reverse=True)
        return [found[one.step, one.attempt] for one in due]

    def _is_whole(self, one: Committed) -> bool:
        return one.path.parent != self._target.root or retention.is_whole(self._target, one)

    def held(self, one: Committed) -> list[int]:
        """The ranks whose containers of a checkpoint this process brings."""
        tier = next(tier for tier in self._before if tier.root == one.path.parent)
        return tier.sends(one.path)

    def arriving(self, one: Committed, mark: bytes) -> Uncommitted | Location:
        """As :meth:`Tier.arriving`."""
        return self._target.arriving(self._target.root / step_name(one.step), one.attempt, mark)

    def has(self, identity: Identity) -> bool:
        """Whether a checkpoint is known to be in the target."""
        return identity in self._known

    def needs(self, one: Committed) -> bool:
        """Whether a checkpoint is still to be brought to the target, as far as is known."""
        identity = one.step, one.attempt
        return one.sequence is not None and not any(
            identity in these for these in (self._known, self._lost, self._unwanted)
        )

    def brought(self, copies: Sequence[Committed]) -> None:
        """Note that a checkpoint is in the target."""
        self.drop(copies[0].path)
        self._known.add((copies[0].step, copies[0].attempt))

    def lose(self, copies: Sequence[Committed]) -> None:
        """Note that a checkpoint will never be in the target."""
        self.drop(copies[0].path)
        self._lost.add((copies[0].step, copies[0].attempt))
