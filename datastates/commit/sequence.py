"""Sequence numbers, which give checkpoints the order of their snapshots, not of their steps or commits."""

from __future__ import annotations

import threading
from pathlib import Path

from datastates.commit.newest import numbered


def next_sequence(root: Path) -> int:
    """A sequence number above those of the committed checkpoints below ``root``.

    A manifest that cannot be read may hold a number above all others: it counts for one more.
    """
    every = [one.sequence for one in numbered(root)]
    return 1 + max((sequence for sequence in every if sequence is not None), default=0) + every.count(None)


class Order:
    """Gives the checkpoints of a directory sequence numbers in the order of their snapshots, not of their commits.

    Thread-safe.
    """

    def __init__(self, root: Path) -> None:
        """Remember ``root``; nothing is read yet."""
        self._root = root
        self._lock = threading.Lock()
        self._given = 0
        self._begun = 0
        self._reserved: dict[int, int] = {}

    def sequence(self, number: int) -> int:
        """The sequence number of the snapshot with this ``number``, from 0. Ask once for each, when it is committed."""
        with self._lock:
            if number >= self._begun:
                first = max(self._given + 1, next_sequence(self._root))
                # snapshots taken before this one may be committed later
                self._reserved.update({n: first + n - self._begun for n in range(self._begun, number + 1)})
                self._begun, self._given = number + 1, self._reserved[number]
            return self._reserved.pop(number)
