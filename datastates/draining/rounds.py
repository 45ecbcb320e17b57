"""Work in the background, round by round, until nothing is left. A place that fails costs a run nothing."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

from datastates._base import log, workers
from datastates._base.waiting import Bell
from datastates._base.workers import Workers
from datastates.draining.pace import Pace
from datastates.errors import ClosedError, StorageError, ThreadStartError, said
from datastates.storage.location import Location

_SHORTEST, _LONGEST = 0.2, 30.0
"""Seconds between two tries: each pause is twice the one before."""


class Rounds(ABC):
    """Brings what is due to a place, on a thread of its own. Thread-safe."""

    def __init__(self, place: Location, is_busy: Callable[[], bool]) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            place: The place, for the log.
            is_busy: Whether a save is in flight: it comes first.
        """
        self.failure = ""
        """Why the last try has failed; empty if it has not."""
        self._place = place
        self._threads = Workers("datastates-drain", 1)
        self._bell, self._lock = Bell(), threading.Lock()
        self._pace = Pace(is_busy, self._bell, self._is_last)
        self._works = self._is_called = self._closing = False
        self._pause = _SHORTEST
        self._told: tuple[object, ...] = ()  # the kind of the last failure
        _every.add(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is due; False if something is after ``timeout`` seconds, or was given up."""
        return self._bell.wait_for(lambda: not self._works, timeout) and not self.failure

    def close(self) -> None:
        """Bring what is due, and end. What fails now is left to a later run. Can be repeated."""
        self._closing = True
        self._bell.ring()
        self._threads.stop()
        self._threads.join()

    # --- for those who derive

    @abstractmethod
    def _round(self) -> bool | None:
        """Bring one thing. True: there may be more; False: try again later; None: nothing is left to do."""

    def _call(self, works: Callable[[], None] = lambda: None) -> None:
        """Begin rounds, as there is something to do. ``works`` is called once who waits would wait for them."""
        with self._lock:
            self._is_called = True
            begins = not (self._works or self._closing)
            self._works |= begins
            works()
        try:
            if begins:
                self._threads.do(self._work)
        except (ThreadStartError, ClosedError) as error:  # the checkpoint is committed all the same
            self._works, self.failure = False, said(error)
            log.warning("checkpoints wait to be brought to %s: %s", self._place, error)
        self._bell.ring()

    def _is_last(self) -> bool:
        """Whether a try that fails now is the last one."""
        return self._closing or workers.is_ending()

    def _later(self) -> float | None:
        """Nothing could be done now: the seconds until the next round; None to give up."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST)
        return pause

    def _failed(self, text: str, *, is_new: bool = True) -> float | None:
        """Note a failure; returns the seconds until the next try, None if this was the last."""
        self.failure = text
        if self._is_last():
            log.warning("not all checkpoints are in %s: a later run or datastates drain goes on: %s", self._place, text)
            return None
        if is_new:
            log.warning("checkpoints wait to be brought to %s: %s", self._place, text)
        return Rounds._later(self)

    def _pace_of(self, nbytes: int) -> None:
        """Let saves in flight go first, but never for long: there may always be one."""
        self._pace(nbytes)

    def _fork(self) -> None:
        """In a forked child: the thread is the parent's."""
        self._lock, self._works = threading.Lock(), False

    # --- on the thread

    def _work(self) -> None:
        while self._goes_on():
            pass
        self._bell.ring()

    def _goes_on(self) -> bool:
        """Make a round, and wait until the next; False if nothing is left to do."""
        self._is_called, was_last = False, self._is_last()
        pause = self._try()
        with self._lock:
            if pause is None and not self._is_called:
                self._works = False
                return False
        if pause:
            self._bell.wait_for(lambda: self._is_called or self._is_last() != was_last, pause)
        return True

    def _try(self) -> float | None:
        """Make a round; returns the seconds until the next one, None if nothing is left to do."""
        try:
            rest = self._round()
            self.failure, self._told = "", ()
        except BaseException as error:  # also what a store raises against its contract, and obstore's panics
            is_new, self._told = _kind(error) != self._told, _kind(error)
            return self._failed(said(error) or type(error).__name__, is_new=is_new)
        finally:
            self._bell.ring()
        if rest:
            self._pause = _SHORTEST
            return 0.0
        return None if rest is None else self._later()


def _kind(error: BaseException) -> tuple[object, ...]:
    """What failures have in common that need to be told once, whatever the names in them."""
    return type(error), *((error.errno, error.operation) if isinstance(error, StorageError) else ())


_every: weakref.WeakSet[Rounds] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_every):
        one._fork()


os.register_at_fork(after_in_child=_after_fork)
