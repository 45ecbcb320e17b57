"""Lets snapshots in flight go before what is sent in the background, but never for long: there may always be one."""

from __future__ import annotations

from collections.abc import Callable

from datastates._base.waiting import Bell

_PIECE = 8 << 20
"""Bytes that are sent between two looks at the snapshots in flight."""
_ASIDE = 0.1
"""Seconds for which a piece waits at most while a snapshot is in flight."""


class Pace:
    """Called with the number of bytes before they are sent: waits a little while a snapshot is in flight.

    For one thread.
    """

    def __init__(self, is_busy: Callable[[], bool], bell: Bell, is_last: Callable[[], bool] = lambda: False) -> None:
        """Begin with nothing sent.

        Args:
            is_busy: Whether a snapshot is in flight.
            bell: Is rung when ``is_last`` changes.
            is_last: Whether the process waits for what is sent.
        """
        self._is_busy, self._bell, self._is_last = is_busy, bell, is_last
        self._sent = 0

    def __call__(self, nbytes: int) -> None:
        """Take note of bytes; it may wait."""
        self._sent += nbytes
        if self._sent >= _PIECE:
            self._sent = 0
            if self._is_busy():
                self._bell.wait_for(lambda: not self._is_busy() or self._is_last(), _ASIDE)
