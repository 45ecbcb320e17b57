"""SIGTERM: what is in flight is committed before the process ends."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

_AGAIN_SECONDS = 0.1


class Termination:
    """Holds SIGTERM back until all that was in flight has ended; then whatever handled the signal before does so.

    The handler waits for nothing: it runs inside whatever it has interrupted, which may hold any lock. It wakes a
    thread, which waits, and then sends the signal again. The handler then runs in the main thread once more, and gives
    the signal to the one before.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """Take the signal over, in the main thread; ``wait`` returns once what was in flight has ended."""
        self._wait = wait
        self._process = 0  # the one that has the thread: a forked child has none
        self._came: queue.SimpleQueue[bool] = queue.SimpleQueue()  # it may be put into by a handler
        self._is_over = False  # nothing that was in flight is any more
        self._has_come = self._is_given = False
        self._previous: Any = signal.signal(signal.SIGTERM, self._handle)

    def watch(self) -> None:
        """Something is about to be in flight: from now on the signal has to wait."""
        if self._process != os.getpid():
            self._came = queue.SimpleQueue()
            threading.Thread(target=self._watch, name="datastates-sigterm", daemon=True).start()
            self._process = os.getpid()

    def _watch(self) -> None:
        if self._came.get():
            self._wait()
            self._is_over = True
            main = threading.main_thread().ident
            assert main is not None
            while not self._is_given:
                # to the main thread, as it ends what that waits in; again, as it may come just before it begins to wait
                signal.pthread_kill(main, signal.SIGTERM)
                time.sleep(_AGAIN_SECONDS)

    def _handle(self, number: int, frame: Any) -> None:
        if self._process == os.getpid() and not self._is_over:
            self._has_come = True
            self._came.put(True)
            return
        self._is_given = True
        self._give_back()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end(self) -> None:
        """Nothing is in flight, and nothing more will be; a signal that has come is given on here."""
        self._is_over = True
        self._came.put(False)
        if self._has_come and not self._is_given:
            self._handle(signal.SIGTERM, None)
        self._give_back()

    def _give_back(self) -> None:
        """Give the signal back to who had it before, unless somebody else has it by now."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
