"""The saves of one run in a tier: earlier runs are fenced, what they left is removed, old checkpoints are deleted."""

from __future__ import annotations

import threading

from datastates.commit import retention
from datastates.commit.tier import Opening, Tier
from datastates.config import Keep


class Run:
    """The saves of one rank. Thread-safe."""

    def __init__(self, tier: Tier, opening: Opening, keep: Keep, *, is_coordinator: bool) -> None:
        """Remember the place; nothing is read or written yet.

        Args:
            tier: The place of the checkpoints.
            opening: The run's opening of it.
            keep: The checkpoints that are kept.
            is_coordinator: Whether this rank commits.
        """
        self._tier = tier
        self._opening = opening
        self._keep = keep
        self._is_coordinator = is_coordinator
        self._deletion = threading.Lock()

    def begin(self) -> None:
        """Begin to save. On the coordinator the first call fences earlier runs, and removes what they left.

        Raises:
            FencedError: A newer run has begun to save in the tier.
            StorageError: It cannot be written down that this run saves there, or the place is another one now.
        """
        if self._is_coordinator:
            # not when it was opened: who only reads deletes nothing
            self._opening.begin_to_save(self._tier.sweep)
        else:
            self._opening.refuse_elsewhere()

    def retain(self) -> None:
        """Delete the checkpoints that are not kept. Called after each commit."""
        with self._deletion:
            retention.retain(self._tier, self._keep)
