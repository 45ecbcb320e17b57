"""The saves of one run in a tier: earlier runs are fenced, what they left is removed, old checkpoints are deleted."""

from __future__ import annotations

import contextlib
import threading

from datastates.commit import retention, room
from datastates.commit.fence import Opening
from datastates.commit.tier import Tier
from datastates.config import Keep
from datastates.errors import DatastatesError
from datastates.storage.location import Location


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
        if self._is_coordinator:
            self._opening.begin_to_save(self._clear)
        else:
            self._opening.refuse_elsewhere()

    def _clear(self) -> None:
        """Not when it was opened: who only reads deletes nothing. Not after the commit: a disk may be full."""
        self._tier.sweep()
        self._delete()

    def retain(self) -> None:
        """Delete the checkpoints that are not kept. Called after each commit."""
        self.restored = None
        self.is_full = False
        self._delete()

    def _delete(self) -> None:
        with self._deletion:
            retention.retain(self._tier, self._keep, () if self.restored is None else (self.restored,))

    def make_room(self) -> str:
        """On the coordinator, where the disk is full: delete what is not kept; says what has gone, or could go."""
        if not self._is_coordinator:
            return ""
        self.is_full = True
        with contextlib.suppress(DatastatesError):
            before = retention.older(self._tier)
            self._delete()
            left = retention.older(self._tier)
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
