"""The saves of one run in a tier: earlier runs are fenced, what they left is removed, old checkpoints are deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from datastates.commit import retention
from datastates.commit.names import step_name
from datastates.commit.tier import Opening, Tier
from datastates.config import Keep
from datastates.storage.location import Location


class Run:
    """The saves of one rank. Thread-safe."""

    def __init__(self, tier: Tier, opening: Opening, keep: Keep, *, is_coordinator: bool, is_alone: bool) -> None:
        """Remember the place; nothing is read or written yet.

        Args:
            tier: The place of the checkpoints.
            opening: The run's opening of it.
            keep: The checkpoints that are kept.
            is_coordinator: Whether this rank commits.
            is_alone: Whether it is the only one.
        """
        self._tier = tier
        self._opening = opening
        self._keep = keep
        self._is_coordinator = is_coordinator
        self._is_alone = is_alone
        self._swept = False
        self._deletion = threading.Lock()

    def places(self, step: int) -> tuple[Callable[[], Location], Callable[[], Location]]:
        """Two functions: one begins to save a step and returns its expected path, one returns the path to commit to."""
        chosen: list[Location] = []

        def expected() -> Location:
            if self._is_coordinator:
                self._begin()
            # of several ranks only the coordinator knows the revision, and only when it commits
            if not self._is_alone:
                return self._tier.root / step_name(step)
            chosen.append(self._tier.target(step))
            return chosen[0]

        def final() -> Location:
            return chosen.pop() if chosen else self._tier.target(step, in_flight=False)

        return expected, final

    def _begin(self) -> None:
        self._opening.begin_to_save()
        if not self._swept:  # not at the opening: who only reads deletes nothing
            self._tier.sweep()
            self._swept = True

    def retain(self) -> None:
        """Delete the checkpoints that are not kept. Called after each commit."""
        with self._deletion:
            retention.retain(self._tier, self._keep)
