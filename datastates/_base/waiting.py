"""Waiting for other threads, by means that an exception in the middle of a wait leaves intact.

An interrupt may come at any instruction of the waiting thread, also within the standard library. A
``threading.Condition``, or what is made of one (``Event``, ``Future``), then stays locked, and all threads that use it
hang.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


class Bell:
    """Wakes the threads that wait until something holds. Thread-safe; it may be rung in a signal handler."""

    def __init__(self) -> None:
        """Begin with nobody waiting."""
        self._waiting: set[queue.SimpleQueue[None]] = set()

    def ring(self) -> None:
        """Let every waiting thread look again. Call it after the change that they wait for."""
        for one in list(self._waiting):
            one.put(None)

    def wait_for(self, holds: Callable[[], _Found], timeout: float | None = None) -> _Found:
        """Wait until ``holds()`` is true; returns its last value, which is false only after ``timeout`` seconds."""
        if found := holds():
            return found
        end = None if timeout is None else time.monotonic() + timeout
        rung: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting.add(rung)
        try:
            while not (found := holds()):
                left = None if end is None else min(end - time.monotonic(), threading.TIMEOUT_MAX)
                if left is not None and left <= 0:
                    break
                with contextlib.suppress(queue.Empty):
                    rung.get(timeout=left)
            return found
        finally:
            self._waiting.discard(rung)


class Flag:
    """As ``threading.Event``: threads wait until it is set. Thread-safe."""

    def __init__(self) -> None:
        """Begin unset."""
        self._is_set = False
        self._bell = Bell()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it for ever."""
        self._is_set = True
        self._bell.ring()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False if it is not after ``timeout`` seconds."""
        return self._bell.wait_for(self.is_set, timeout)
