"""SIGTERM handling: commits the snapshots in flight before the process ends."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from datastates._base import log
from datastates._base.workers import start

_AGAIN_SECONDS = 0.1


class Termination:
    """Holds SIGTERM back until the snapshots in flight have ended, then passes it to the previous handler.

    The handler itself never waits, because the code that it interrupts may hold any lock. It wakes a thread. That
    thread waits for the snapshots, then sends the signal again. The handler then runs once more in the main thread, and
    passes the signal to the previous handler.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """Install the handler; call it in the main thread. ``wait`` returns once the snapshots in flight have ended."""
        self._wait = wait
        self._process = 0  # the process that has the thread: a forked child has none
        self._came: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its put() may be called in a signal handler
        self._is_over = False  # the snapshots that the signal waits for have ended
        self._has_come = self._is_given = False
        self._previous: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._handle)

    def watch(self) -> None:
        """Begin to hold SIGTERM back. Call this before a snapshot is taken."""
        if self._process != os.getpid():
            if self._process:  # this is a forked child
                self._came = queue.SimpleQueue()
            start(threading.Thread(target=self._watch, name="datastates-sigterm", daemon=True))
            self._process = os.getpid()

    def _watch(self) -> None:
        if not self._came.get():
            self._came.put(False)  # ends a second such thread, too, which an interrupted call may have started
        else:
            try:
                self._wait()
            except Exception as error:  # the signal must take effect nevertheless
                log.error("SIGTERM: the snapshots in flight are not waited for", of=error)
            self._is_over = True
            main = threading.main_thread().ident
            assert main is not None
            while not self._is_given:
                # interrupts a system call that the main thread may be blocked in; repeated, because the signal may come
                # just before the system call
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
        """Stop holding SIGTERM back, once no snapshot is in flight. A signal that was held back is passed on here."""
        self._is_over = True
        self._came.put(False)
        if self._has_come and not self._is_given:
            self._handle(signal.SIGTERM, None)
        self._give_back()

    def _give_back(self) -> None:
        """Restore the previous handler, unless another one has been installed since."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
