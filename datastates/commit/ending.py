"""How a snapshot ends: where its container is written, and what becomes of it once that is on stable storage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from datastates.commit import manifest
from datastates.commit.ballot import Ballot, Vote

Identity = dict[str, int | str]


def identity_alone(attempt: str) -> Identity:
    """What the index of a file says that is part of no checkpoint of this package's own kind."""
    return {"step": 0, "rank": 0, "world_size": 1, "attempt": attempt}


class Ending(Protocol):
    """What a snapshot needs to know of its end. Used by one thread at a time.

    Attributes:
        path: Where its container is to be written.
        identity: What the container's index says of it.
        committed: When it was committed, on the monotonic clock; None before that.
    """

    path: Path
    identity: Identity
    committed: float | None

    def commit(self, vote: Vote) -> Path:
        """Make it what a restore finds; returns where that stands."""

    def abandon(self, *, made: bool) -> None:
        """Leave nothing behind; ``made``: the container's file was made for it. Never raises."""

    def decline(self, error: BaseException) -> None:
        """Tell whoever waits for this process that it has failed. Never raises."""


class CheckpointEnding:
    """A container of a checkpoint directory, which its ranks commit together."""

    def __init__(
        self,
        pending: manifest.Pending,
        ballot: Ballot,
        target: Callable[[], Path],
        retain: Callable[[], None],
    ) -> None:
        """Write into a pending directory.

        ``target`` says, at the commit, where the checkpoint is to stand. ``retain`` is called once it is committed,
        before anybody is told: what it deletes is then gone.
        """
        self.path = pending.file(manifest.container_name(ballot.rank))
        self.identity: Identity = {
            "step": ballot.step,
            "rank": ballot.rank,
            "world_size": ballot.ranks,
            "attempt": pending.attempt,
        }
        self.committed: float | None = None
        self._pending = pending
        self._ballot = ballot
        self._target = target
        self._retain = retain
        self._voted = False

    def commit(self, vote: Vote) -> Path:
        """Vote, and wait for the other ranks; raises as :meth:`~datastates.commit.ballot.Ballot.cast` does."""

        def retain() -> None:
            self.committed = time.monotonic()
            self._retain()

        if self._pending.shared:
            manifest.leave(self._pending)
        self._voted = True
        path = self._ballot.cast(vote, self._pending, self._target, retain)
        self._pending.close()
        return path

    def abandon(self, *, made: bool) -> None:
        """Remove the directory, as far as it is this process's."""
        del made
        manifest.abandon(self._pending)

    def decline(self, error: BaseException) -> None:
        """Tell the other ranks, unless they know."""
        if not self._voted:
            self._ballot.decline(error)


@dataclass(slots=True)
class FileEnding:
    """One container file by itself, for whoever began it to put in its place. See :class:`Ending`."""

    path: Path
    identity: Identity
    committed: float | None = None

    def commit(self, vote: Vote) -> Path:
        """Nothing is left to be done."""
        del vote
        return self.path

    def abandon(self, *, made: bool) -> None:
        """Remove the file, unless it is another's."""
        if made:
            with contextlib.suppress(OSError):  # its writer's error is what is told
                self.path.unlink()

    def decline(self, error: BaseException) -> None:
        """Nobody waits but for the snapshot."""
