"""Tells of snapshots that have ended, in the order in which they were taken."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from datastates.saving.snapshot import Snapshot, has_ended


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
