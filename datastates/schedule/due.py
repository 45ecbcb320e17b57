"""Decides at which steps a snapshot is due: the interval that loses the least time, the same steps on all ranks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from datastates.config import Settings
from datastates.errors import CommitError, SettingsError
from datastates.ranks.world import World
from datastates.saving.snapshot import Cost, Snapshot, cost_of, has_ended

_TOLERANCE = 0.05
"""A snapshot may come early by this share of the interval. The lost time is flat around the best interval."""
_CAUTION = 0.8
"""Share of the steps that are left after which to look at the clock again, as steps may become slower."""


def best_interval(cost: float, mtbf: float, durable: float) -> float:
    """Seconds from one snapshot to the next, by Daly's formula.

    Failures come at random, on average every ``mtbf`` seconds. Training then goes on from the last durable snapshot.
    With intervals of t seconds, each of which ends in a wait of ``cost``, the share of useful time is proportional to
    ``(t - cost) / (exp(t / mtbf) - 1)``. The time until a snapshot is durable is lost at each failure. It multiplies
    that share by ``exp(-durable / mtbf)`` for each t, so it does not change the best t. It limits t from below:
    snapshots that come faster than they become durable wait for each other.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), equation 37. Its first term is J. W. Young's, "A first order approximation to the
    optimum checkpoint interval", Communications of the ACM 17 (1974).

    Args:
        cost: Seconds that training waits for each snapshot. The writing in the background is no part of it.
        mtbf: Mean time between failures of the job, in seconds.
        durable: Seconds from the call until the snapshot is committed.
    """
    share = cost / (2 * mtbf)
    if share >= 1:
        return max(mtbf + cost, durable)
    return max(math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(share) / 3 + share / 9), durable)


def steps_to_wait(elapsed: float, steps: int, interval: float | None) -> int:
    """The number of steps after which to ask again; 0 if a snapshot is due now.

    Args:
        elapsed: Seconds since the last snapshot was due.
        steps: Number of steps since then, at least 1.
        interval: Seconds between snapshots; None if it is not known yet.
    """
    if interval is None:
        return steps
    left, step = interval - elapsed, elapsed / steps
    if left <= max(step / 2, _TOLERANCE * interval):
        return 0
    return max(1, int(_CAUTION * left / step))


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


class Due:
    """Answers at each training step whether a snapshot is due. Not thread-safe.

    With a number of steps, its multiples are due. With ``"auto"``, the first step is due, so that a snapshot is
    measured. Later, rank 0 looks at its clock at a few steps, and tells all ranks when it will look again. The ranks
    meet at these steps only: three to six times for each snapshot. Until the first snapshot is committed, they meet
    1, 2, 4, 8… steps after it.
    """

    def __init__(
        self,
        settings: Settings,
        interval: Callable[[float], float | None],
        world: World,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin before the first step.

        Args:
            settings: The settings, with ``every`` and ``mtbf``.
            interval: Returns the seconds between snapshots for an ``mtbf``; None if they are not known yet. Called on
                rank 0.
            world: The ranks that save together.
            name: A name for the meetings, the same on all ranks.
            clock: Seconds on a monotonic clock.
        """
        self._settings = settings
        self._interval = interval
        self._world = world
        self._name = name
        self._clock = clock
        self._last: int | None = None  # the last step that was due
        self._since = 0.0  # the time of that
        self._next = 0  # the step to ask at
        self._asked = 0

    def __call__(self, step: int) -> bool:
        """Whether a snapshot is due after ``step``.

        Raises:
            SettingsError: ``every`` is not set.
            CommitError: The ranks asked about different steps, or rank 0 failed.
            RanksMissingError: Some ranks did not ask in time.
        """
        every = self._settings.every
        if every is None:
            raise SettingsError('every: due() needs it: give a number of steps, or "auto" and mtbf')
        if every != "auto":
            return step % every == 0
        if self._last is None:
            return self._begin_at(step)
        if step < self._last:  # after a roll-back
            self._begin_at(step)
        if step < self._next:
            return False
        wait = int(self._world.agree(f"{self._name}/{self._asked}", str(step).encode(), self._decide))
        self._asked += 1
        self._next = step + wait
        return wait == 0 and self._begin_at(step)

    def _begin_at(self, step: int) -> bool:
        self._last, self._since, self._next = step, self._clock(), step + 1
        return True

    def _decide(self, told: dict[int, bytes]) -> bytes:
        steps = {rank: int(step) for rank, step in sorted(told.items())}
        if len(set(steps.values())) > 1:
            said = ", ".join(f"step {step} on rank {rank}" for rank, step in steps.items())
            raise CommitError(f"the ranks asked due() about different steps: {said}")
        assert self._last is not None
        assert self._settings.mtbf is not None
        elapsed, interval = self._clock() - self._since, self._interval(self._settings.mtbf)
        return str(steps_to_wait(elapsed, steps[0] - self._last, interval)).encode()
