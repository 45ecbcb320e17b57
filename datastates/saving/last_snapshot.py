"""Whether a last snapshot is taken after SIGTERM: if it can be durable before the process is killed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from datastates._base.waiting import Bell

_log = logging.getLogger("datastates")


class LastSnapshot:
    """Decides about a last snapshot once SIGTERM has come. Thread-safe.

    The training thread takes the snapshot, as only it knows when the state is whole. Meanwhile another thread holds
    SIGTERM back.
    """

    def __init__(
        self, grace: float | None, needed: Callable[[], float | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin before SIGTERM.

        Args:
            grace: Seconds from SIGTERM until the process is killed. None: no last snapshot is taken.
            needed: Returns the seconds until a snapshot taken now is durable; None if that is not known.
            clock: Seconds on a monotonic clock.
        """
        self._grace = grace
        self._needed = needed
        self._clock = clock
        self._end: float | None = None  # when the process is killed, while SIGTERM is held back
        self._decision: dict[str, bool] = {}  # setdefault() keeps the first decision
        self._is_settled = False  # the snapshot is in flight, or is not taken
        self._bell = Bell()

    def is_due(self, step: int) -> bool | None:
        """On the training thread, whether to take a snapshot after ``step``; None while no SIGTERM is held back."""
        if (end := self._end) is None:
            return None
        if self._decision:
            self.settle()  # the loop took no snapshot after the answer
            return False
        needed, left = self._needed(), end - self._clock()
        fits = self._decide(needed is not None and needed <= left, step, needed, left)
        if fits:
            self._bell.ring()
        else:
            self.settle()
        return fits

    def _decide(self, fits: bool, step: int | None, needed: float | None, left: float) -> bool:
        if fits and self._decision.setdefault("", True):
            _log.warning("SIGTERM: a last snapshot after step %s: it needs %.1f s, %.1f s are left", step, needed, left)
            return True
        self._decision.setdefault("", False)
        why = "none was measured yet" if needed is None else f"it needs {needed:.1f} s, {left:.1f} s are left"
        _log.warning("SIGTERM: no last snapshot: %s. Those in flight are finished", why)
        return False

    def settle(self) -> None:
        """Tell that the last snapshot is in flight, or is not taken. Does nothing before the decision."""
        if self._decision:
            self._is_settled = True
            self._bell.ring()

    def hold(self, finish: Callable[[], None]) -> None:
        """Once SIGTERM has come, wait until the last snapshot is settled; then call ``finish``.

        A loop that does not ask in time gets no last snapshot.
        """
        if self._grace is None:
            finish()
            return
        self._end = end = self._clock() + self._grace
        while not self._decision:
            needed, now = self._needed(), self._clock()
            if needed is None or now + needed >= end:
                self._decide(False, None, needed, end - now)
                self.settle()
            else:
                self._bell.wait_for(lambda: self._decision, end - now - needed)
        self._bell.wait_for(lambda: self._is_settled, max(0.0, end - self._clock()))
        finish()
        self._end = None
