"""Decides at which steps a snapshot is due, the same steps on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from datastates.config import Settings
from datastates.errors import CommitError, SettingsError
from datastates.ranks.world import World
from datastates.schedule.cadence import steps_to_wait


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
