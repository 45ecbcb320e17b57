"""What the last snapshots cost: how long training waited for them, and how long they took until durable."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from datastates.saving.course import Course
from datastates.schedule.cadence import best_interval

_LAST = 5
"""Number of snapshots that estimates are made from."""


class Costs:
    """The last snapshots of a checkpointer, and estimates from those of them that are committed. Thread-safe."""

    def __init__(self, in_flight: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without snapshots.

        Args:
            in_flight: Most snapshots that are in flight at the same time.
            clock: The clock of :attr:`Course.begin`.
        """
        self._clock = clock
        self._last: deque[Course] = deque(maxlen=_LAST + in_flight)

    def note(self, course: Course) -> None:
        """Take note of a snapshot that has been taken."""
        self._last.append(course)

    def interval(self, mtbf: float) -> float | None:
        """The best seconds between snapshots, with a failure every ``mtbf`` seconds; None before the first commit."""
        if not (last := self._committed()):
            return None
        durable = median(course.times["committed"] for course in last)
        return best_interval(median(course.stall_seconds for course in last), mtbf, durable)

    def seconds_until_durable(self) -> float | None:
        """Seconds until a snapshot that is taken now is committed, by the lowest rate; None before the first commit.

        Snapshots in flight are committed before it.
        """
        if not (last := self._committed()):
            return None
        slowest = max(course.times["committed"] / max(1, course.nbytes) for course in last)
        now = self._clock()
        pending = (course for course in self._last.copy() if not course.ended)
        before = sum(max(0.0, slowest * course.nbytes - (now - course.begin)) for course in pending)
        return before + slowest * last[-1].nbytes

    def _committed(self) -> list[Course]:
        return [course for course in self._last.copy() if "committed" in course.times][-_LAST:]
