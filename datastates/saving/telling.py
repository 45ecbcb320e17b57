"""Tells how snapshots have ended: the user's functions, in the order of the calls, and a later call of a failure."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from datastates._base import log
from datastates.config import Settings
from datastates.errors import SnapshotSkippedError
from datastates.saving.snapshot import Snapshot, error_of, has_ended, undelivered


class Telling:
    """The snapshots that nobody was told of yet. Thread-safe, but one thread at a time takes snapshots."""

    def __init__(self, tell: Callable[[Snapshot], None]) -> None:
        """Begin without snapshots. ``tell`` is called with each one, never on two threads at once."""
        self._tell = tell
        self._untold: deque[Snapshot] = deque()
        self._alone = threading.RLock()  # a callable may save again, which may fail at once

    def expect(self, snapshot: Snapshot) -> None:
        """Note a snapshot as it is taken."""
        self._untold.append(snapshot)

    def withdraw(self, snapshot: Snapshot) -> None:
        """Forget the snapshot that was taken last, if it is noted."""
        with contextlib.suppress(ValueError):
            self._untold.remove(snapshot)

    def tell(self) -> None:
        """Tell of those that have ended, up to the first that has not. Call it after the end of each."""
        with self._alone:
            while self._untold and has_ended(self._untold[0]):
                self._tell(self._untold.popleft())


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


def call_back(settings: Settings, snapshot: Snapshot) -> None:
    """Call ``on_error`` or ``on_commit`` of the settings for a snapshot that has ended; never raises an Exception."""
    call = settings.on_commit if error_of(snapshot) is None else settings.on_error
    if not callable(call):
        return
    snapshot.exception()  # it counts as delivered
    try:
        call(snapshot)
    except BaseException as error:  # an error in the user's function must not disturb training
        if not isinstance(error, Exception) and not log.is_own_thread():
            raise
        log.error("%r raised, called for %r", call, snapshot, of=error)
