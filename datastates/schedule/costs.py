"""What the last snapshots cost: how long training waited for them, and how long they took until durable."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from datastates.saving.snapshot import Cost, Snapshot, cost_of, has_ended
from datastates.schedule.cadence import best_interval

_LAST = 5
"""Number of snapshots that estimates are made from."""


class Costs:
    """The last snapshots of a checkpointer, and estimates from those of them that are committed. Thread-safe."""

    def __init__(self, in_flight: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without snapshots.

        Args:
            in_flight: Most snapshots that are in flight at the same time.
            clock: The clock of :attr:`Cost.begin <datastates.saving.snapshot.Cost.begin>`.
        """
        self._clock = clock
        self._last: deque[Snapshot] = deque(maxlen=_LAST + in_flight)

    def note(self, snapshot: Snapshot) -> None:
        """Take note of a snapshot that has been taken."""
        self._last.append(snapshot)

    def interval(self, mtbf: float) -> float | None:
        """The best seconds between snapshots, with a failure every ``mtbf`` seconds; None before the first commit."""
        if not (last := self._committed()):
            return None
        durable = median(seconds for _, seconds in last)
        return best_interval(median(cost.stall_seconds for cost, _ in last), mtbf, durable)

    def seconds_until_durable(self) -> float | None:
        """Seconds until a snapshot that is taken now is committed, by the lowest rate; None before the first commit.

        Snapshots in flight are committed before it.
        """
        if not (last := self._committed()):
            return None
        slowest = max(seconds / max(1, cost.nbytes) for cost, seconds in last)
        now = self._clock()
        pending = (cost_of(snapshot) for snapshot in self._last.copy() if not has_ended(snapshot))
        before = sum(max(0.0, slowest * cost.nbytes - (now - cost.begin)) for cost in pending)
        return before + slowest * last[-1][0].nbytes

    def _committed(self) -> list[tuple[Cost, float]]:
        """The cost of each of the last committed snapshots, and its seconds until durable."""
        costs = map(cost_of, self._last.copy())
        return [(cost, cost.durable_seconds) for cost in costs if cost.durable_seconds is not None][-_LAST:]
