"""Sequence numbers, which give checkpoints the order of their snapshots, not of their steps or commits."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator

from datastates.commit import fence
from datastates.commit.newest import numbered
from datastates.errors import StorageError
from datastates.ranks.polling import slowest, until
from datastates.storage import Lock, store_of
from datastates.storage.location import Location

_PATIENCE = 10.0
"""Seconds to wait for another process that commits in the directory. It may have been stopped meanwhile."""


def next_sequence(root: Location) -> int:
    """A sequence number above the numbers of all committed checkpoints below ``root``.

    A manifest that cannot be read may hold a number above all others: it counts for one more.
    """
    every = [one.sequence for one in numbered(root)]
    return 1 + max((sequence for sequence in every if sequence is not None), default=0) + every.count(None)


@contextlib.contextmanager
def next_alone(root: Location) -> Iterator[int]:
    """Yield :func:`next_sequence`. Nobody else gets the number until the block, which commits the checkpoint, ends."""
    with _one_at_a_time(root):
        yield next_sequence(root)


@contextlib.contextmanager
def _one_at_a_time(root: Location) -> Iterator[None]:
    """Keep others that commit in a directory waiting until the block ends, if the file system has locks."""
    with _opened(root) as lock:
        until(lambda: lock.hold() is not False or None, time.monotonic() + _PATIENCE, slowest(1))
        yield


def _opened(root: Location) -> Lock:
    while (path := fence.lock_file(root)) != root:
        try:
            return store_of(path).open_lock(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:  # else a newer opening has just taken its place
                raise
    return store_of(root).open_lock(root, write=False)


class Order:
    """Gives the checkpoints of a directory sequence numbers in the order of their snapshots, not of their commits.

    Thread-safe.
    """

    def __init__(self, root: Location) -> None:
        """Remember ``root``; nothing is read yet."""
        self._root = root
        self._lock = threading.Lock()
        self._holders = 0
        self._held = contextlib.ExitStack()
        self._given = 0
        self._begun = 0
        self._reserved: dict[int, int] = {}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """As :func:`_one_at_a_time`, but commits through this object do not wait for each other."""
        with self._lock:
            if not self._holders:
                self._held.enter_context(_one_at_a_time(self._root))
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
                least = next_sequence(self._root)
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
