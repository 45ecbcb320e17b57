"""Sequence numbers, which give checkpoints the order of their snapshots, not of their steps or commits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from datastates.commit.tier import Tier


def next_sequence(tier: Tier) -> int:
    """A sequence number above the numbers of all committed checkpoints in a tier.

    A manifest that cannot be read may hold a number above all others: it counts for one more.
    """
    every = [one.sequence for one in tier.checkpoints(known=True)]
    return 1 + max((sequence for sequence in every if sequence is not None), default=0) + every.count(None)


class Order:
    """Gives the checkpoints of a directory sequence numbers in the order of their snapshots, not of their commits.

    Thread-safe.
    """

    def __init__(self, tier: Tier) -> None:
        """Remember the tier; nothing is read yet."""
        self._tier = tier
        self._lock = threading.Lock()
        self._holders = 0
        self._held = contextlib.ExitStack()
        self._given = 0
        self._begun = 0
        self._reserved: dict[int, int] = {}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """As :meth:`Tier.committing`, but commits through this object do not wait for each other."""
        with self._lock:
            if not self._holders:
                self._held.enter_context(self._tier.committing())
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._held.close()

    @contextlib.contextmanager
    def sequence(self, number: int, ready: Callable[[], None]) -> Iterator[int]:
        """Yield the sequence number of snapshot ``number`` (from 0). Call once for each; commit it within the block.

        ``ready`` is called before others are kept waiting.
        """
        ready()
        with self._alone():
            with self._lock:
                least = next_sequence(self._tier)
                before = self._begun, self._given
                if number >= self._begun:
                    first = max(self._given + 1, least)
                    # snapshots taken before this one may be committed later
                    self._reserved.update({n: first + n - self._begun for n in range(self._begun, number + 1)})
                    self._begun, self._given = number + 1, self._reserved[number]
                chosen = self._reserved.pop(number)
            try:
                yield chosen
            except BaseException:
                with self._lock:
                    if self._given == chosen:
                        # no checkpoint has this number, so others may take the numbers that were reserved with it
                        self._begun, self._given = before
                raise
