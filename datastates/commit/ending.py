"""Ends of a snapshot: the place of its container file, and the commit or removal of the file."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

from datastates.commit.votes import Vote
from datastates.storage import store_of
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

    def open(self, nbytes: int) -> None:
        """Make the folder for a container of about ``nbytes`` bytes. If this fails, call :meth:`abandon`."""

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


@dataclass(slots=True)
class FileEnding:
    """The end of a single container file, which the caller publishes itself. See :class:`Ending`."""

    path: Location
    identity: Identity
    committed: float | None = None

    def open(self, nbytes: int) -> None:
        """Do nothing: the caller has made the folder."""
        del nbytes

    def commit(self, vote: Vote) -> Location:
        """Return the path of the file; the caller does the rest."""
        del vote
        return self.path

    def abandon(self, *, made: bool) -> None:
        """Remove the file if this snapshot created it."""
        if made:
            with contextlib.suppress(OSError):  # the writer's error is reported instead
                store_of(self.path).discard([self.path])

    def cause_of(self, error: BaseException, needed: int) -> BaseException:
        """``error`` itself: no other cause is known for a single file."""
        del needed
        return error

    def decline(self, error: BaseException) -> None:
        """Do nothing: no other rank waits for this file."""
