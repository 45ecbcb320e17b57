"""The snapshots that a checkpointer has taken, and their failures, each of which is told once."""

from __future__ import annotations

from collections.abc import Callable

from datastates._base import log
from datastates.errors import SnapshotSkippedError
from datastates.saving.course import Course


class Taken:
    """The snapshots whose end was not looked at yet. Not thread-safe.

    Attributes:
        courses: These snapshots, the oldest first.
        failures: Number of failed snapshots, as counted at the last :meth:`failure`.
    """

    def __init__(self, *, raises: bool, ended: Callable[[Course], None]) -> None:
        """Begin without snapshots.

        Args:
            raises: Whether :meth:`failure` returns a failure to raise it.
            ended: Called by :meth:`failure` with each snapshot that has ended.
        """
        self.courses: list[Course] = []
        self.failures = 0
        self._raises = raises
        self._ended = ended

    def failure(self) -> BaseException | None:
        """The first failure since the last call, if failures are to be raised. The others are logged."""
        ended = [c for c in self.courses if c.ended]
        self.courses = [c for c in self.courses if c not in ended]  # others may have ended by now
        for course in ended:
            self._ended(course)
        self.failures += sum(c.error is not None for c in ended)
        undelivered = [(c, error) for c in ended if (error := c.undelivered()) is not None]
        # do not raise an error here that another rank has raised: its next snapshot would be skipped, and so on
        own = [error for _, error in undelivered if not isinstance(error, SnapshotSkippedError)]
        raised = own[0] if own and self._raises else None
        for course, error in undelivered:
            if error is not raised:
                log.warning("snapshot %d failed: %s", course.step, error)
        return raised
