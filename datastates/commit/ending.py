"""Ends of a snapshot: the place of its container file, and the commit or removal of the file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from datastates.commit import manifest
from datastates.commit.ballot import Ballot, Vote
from datastates.commit.tier import Uncommitted
from datastates.storage import folders_of
from datastates.storage.location import Location

Identity = dict[str, int | str]


def identity_alone(attempt: str) -> Identity:
    """The identity to store in the index of a container file that is in no checkpoint directory of this package."""
    return {"step": 0, "rank": 0, "world_size": 1, "attempt": attempt}


class Ending(Protocol):
    """Commits or abandons one snapshot. Used by one thread at a time.

    Attributes:
        path: The path to write the container to. Known once it is open.
        identity: The identity to store in the container's index. Known once it is open.
        committed: When this process committed it, on the monotonic clock; None if it has not.
    """

    path: Location
    identity: Identity
    committed: float | None

    def open(self) -> None:
        """Make the folder for the container. If this raises, or is interrupted, call :meth:`abandon`."""

    def commit(self, vote: Vote) -> Location:
        """Commit the container once it is on stable storage; returns the path of the result."""

    def abandon(self, *, made: bool) -> None:
        """Remove the files of the snapshot. ``made``: it created the container's file. Never raises."""

    def cause_of(self, error: BaseException, needed: int) -> BaseException:
        """The error to report to the user where ``error`` ended the snapshot: its cause if known, else ``error``.

        Called once its files are removed; ``needed`` is the length of its file in bytes.
        """

    def decline(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one that it has failed. Never raises."""


class CheckpointEnding:
    """The end of one rank's snapshot in a checkpoint directory, which all ranks commit together."""

    def __init__(
        self,
        expected: Location,
        ballot: Ballot,
        target: Callable[[], Location],
        retain: Callable[[], None],
    ) -> None:
        """Prepare to write into a pending checkpoint; nothing is made yet.

        Args:
            expected: The path that the checkpoint is expected to have. The pending one lies beside it.
            ballot: The agreement that commits it.
            target: Returns the path that the checkpoint is to have; called at the commit.
            retain: Called after the commit, before the other ranks are told: to delete old checkpoints.
        """
        self.path = expected
        self.identity: Identity = {}
        self.committed: float | None = None
        self._expected = expected
        self._pending: Uncommitted | None = None
        self._ballot = ballot
        self._target = target
        self._retain = retain
        self._voted = False

    def open(self) -> None:
        """Begin the checkpoint; raises StorageError, and FencedError where a newer run has begun to save."""
        ballot = self._ballot
        self._pending = pending = ballot.pending(self._expected)
        self.path = pending.file(manifest.container_name(ballot.world.rank))
        self.identity = {
            "step": ballot.step,
            "rank": ballot.world.rank,
            "world_size": ballot.world.size,
            "attempt": pending.attempt,
        }
        pending.begin()

    def commit(self, vote: Vote) -> Location:
        """Vote and wait for the other ranks; raises as :meth:`~datastates.commit.ballot.Ballot.cast` does."""

        def retain() -> None:
            self.committed = time.monotonic()
            self._retain()

        pending = self._pending
        assert pending is not None
        pending.seal()
        self._voted = True
        path = self._ballot.cast(vote, pending, self._target, retain)
        pending.close()
        return path

    def abandon(self, *, made: bool) -> None:
        """Remove the files of this process."""
        del made
        if self._pending is not None:
            self._pending.abandon()

    def cause_of(self, error: BaseException, needed: int) -> BaseException:
        """FencedError where a newer run has begun to save, as it stops the checkpoint; else ``error``."""
        return self._ballot.cause_of(error, needed)

    def decline(self, error: BaseException) -> None:
        """Tell the other ranks, unless this one has voted."""
        if not self._voted:
            self._ballot.decline(error)


@dataclass(slots=True)
class FileEnding:
    """The end of a single container file, which the caller publishes itself. See :class:`Ending`."""

    path: Location
    identity: Identity
    committed: float | None = None

    def open(self) -> None:
        """Do nothing: the caller has made the folder."""

    def commit(self, vote: Vote) -> Location:
        """Return the path of the file; the caller does the rest."""
        del vote
        return self.path

    def abandon(self, *, made: bool) -> None:
        """Remove the file if this snapshot created it."""
        if made:
            with contextlib.suppress(OSError):  # the writer's error is reported instead
                folders_of(self.path).remove(self.path)

    def cause_of(self, error: BaseException, needed: int) -> BaseException:
        """``error`` itself: no other cause is known for a single file."""
        del needed
        return error

    def decline(self, error: BaseException) -> None:
        """Do nothing: no other rank waits for this file."""
