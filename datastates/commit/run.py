"""The saves of one run in a tier: earlier runs are fenced, what they left is removed, old checkpoints are deleted.

A call of :func:`datastates.snapshot` is a run without an opening: it fences and deletes nothing.
"""

from __future__ import annotations

import contextlib
import threading

from datastates.commit import retention, room
from datastates.commit.fence import Opening
from datastates.commit.sequence import Order
from datastates.commit.tier import Tier
from datastates.config import Keep
from datastates.errors import DatastatesError
from datastates.storage.location import Location


class Run:
    """The saves of one rank. Thread-safe."""

    def __init__(
        self, tier: Tier, opening: Opening | None = None, keep: Keep | None = None, *, is_coordinator: bool = True
    ) -> None:
        """Remember the place; nothing is read or written yet.

        Args:
            tier: The place of the checkpoints.
            opening: The run's opening of it; None for a single checkpoint.
            keep: The checkpoints that are kept; not used without an opening.
            is_coordinator: Whether this rank commits.
        """
        self.tier = tier
        self.opening = opening
        self.order = Order(tier)
        self._keep = keep or Keep()
        self._is_coordinator = is_coordinator
        self.restored: Location | None = None
        """The checkpoint that was restored last, until the next commit: after a roll-back it stays until then."""
        self.is_full = False
        """Whether the disk was full since the last commit: then snapshots in flight must not compete for the room."""
        self._deletion = threading.Lock()

    def begin(self) -> None:
        """Begin to save. On the coordinator the first call fences earlier runs, and removes what they left.

        Raises:
            FencedError: A newer run has begun to save in the tier.
            StorageError: It cannot be written down that this run saves there, or the place is another one now.
        """
        if self.opening is None:
            return
        if self._is_coordinator:
            self.opening.begin_to_save(self._clear)
        else:
            self.opening.refuse_elsewhere()

    def _clear(self) -> None:
        """Not when it was opened: who only reads deletes nothing. Not after the commit: a disk may be full."""
        self.tier.sweep()
        self._delete()

    def retain(self) -> None:
        """Delete the checkpoints that are not kept. Called after each commit."""
        self.restored = None
        self.is_full = False
        if self.opening is not None:
            self._delete()

    def _delete(self) -> None:
        with self._deletion:
            retention.retain(self.tier, self._keep, () if self.restored is None else (self.restored,))

    def make_room(self) -> str:
        """On the coordinator, where the disk is full: delete what is not kept; says what has gone, or could go."""
        if self.opening is None or not self._is_coordinator:
            return ""
        self.is_full = True
        with contextlib.suppress(DatastatesError):
            before = retention.older(self.tier)
            self._delete()
            left = retention.older(self.tier)
            if gone := len(before) - len(left):
                which = (
                    "checkpoint, which need not be kept, was"
                    if gone == 1
                    else "checkpoints, which need not be kept, were"
                )
                return f". {gone} older {which} deleted"
            if left:
                advice = "or set keep_last" if self._keep.last is None else "or keep fewer by keep_last and keep_every"
                return f". {room.taken(left)} could go: delete them, {advice}"
        return ""
