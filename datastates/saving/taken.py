"""The snapshots that a checkpointer has taken, and their failures, each of which is told once."""

from __future__ import annotations

from collections.abc import Callable

from datastates._base import log
from datastates.errors import SnapshotSkippedError
from datastates.saving.snapshot import Snapshot, error_of, has_ended, undelivered


class Taken:
    """The snapshots whose end was not looked at yet. Not thread-safe.

    Attributes:
        snapshots: These, the oldest first.
        failures: Number of failed snapshots, as counted at the last :meth:`failure`.
    """

    def __init__(self, *, raises: bool, ended: Callable[[Snapshot], None]) -> None:
        """Begin without snapshots.

        Args:
            raises: Whether :meth:`failure` returns a failure to raise it.
            ended: Called by :meth:`failure` with each snapshot that has ended.
        """
        self.snapshots: list[Snapshot] = []
        self.failures = 0
        self._raises = raises
        self._ended = ended

    def failure(self) -> BaseException | None:
        """The first failure since the last call, if failures are to be raised. The others are logged."""
        ended = [one for one in self.snapshots if has_ended(one)]
        self.snapshots = [one for one in self.snapshots if one not in ended]  # others may have ended by now
        for snapshot in ended:
            self._ended(snapshot)
        self.failures += sum(error_of(one) is not None for one in ended)
        failed = [(one, error) for one in ended if (error := undelivered(one)) is not None]
        # do not raise an error here that another rank has raised: its next snapshot would be skipped, and so on
        own = [error for _, error in failed if not isinstance(error, SnapshotSkippedError)]
        raised = own[0] if own and self._raises else None
        for snapshot, error in failed:
            if error is not raised:
                log.warning("snapshot %d failed: %s", snapshot.step, error)
        return raised
