"""SIGTERM handling: commits the snapshots in flight before the process ends."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from datastates._base import log
from datastates._base.workers import start

_AGAIN_SECONDS = 0.1


class Termination:
    """Holds SIGTERM back until the snapshots in flight have ended, then passes it to the previous handler.

    The handler itself never waits, because the code that it interrupts may hold any lock. It wakes a thread. That
    thread waits for the snapshots, then sends the signal again. The handler then runs once more in the main thread, and
    passes the signal to the previous handler.

    A scheduler sends SIGTERM to the program's children, too. The workers of torch's data loaders that are forked
    meanwhile ignore it, so that the loop has batches until the last snapshot. They end with the program. Other workers
    die, and the loader's handler of SIGCHLD then raises that, anywhere in the main thread. That error is held back
    together with the signal, so that the step is finished.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """Install the handler; call it in the main thread. ``wait`` returns once the snapshots in flight have ended."""
        self._wait = wait
        self._process = 0  # the process that has the thread: a forked child has none
        self._came: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its put() may be called in a signal handler
        self._is_over = False  # the snapshots that the signal waits for have ended
        self._has_come = self._is_given = False
        self._of_children: Any = None  # the handler of SIGCHLD, while SIGTERM is held back
        self._failure: Exception | None = None  # that it has raised since
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
            if not self._has_come and callable(before := signal.getsignal(signal.SIGCHLD)):
                self._of_children = before
                signal.signal(signal.SIGCHLD, self._handle_child)
            self._has_come = True
            self._came.put(True)
            return
        self._is_given = True
        self._give_back()
        if callable(self._previous):
            self._previous(number, frame)
            if self._failure is not None:
                raise self._failure
        elif self._previous != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _handle_child(self, number: int, frame: Any) -> None:
        try:
            self._of_children(number, frame)
        except Exception as error:
            self._failure = self._failure or error

    def end(self) -> None:
        """Stop holding SIGTERM back, once no snapshot is in flight. A signal that was held back is passed on here."""
        self._is_over = True
        self._came.put(False)
        self._failure = None  # the loop has ended without it
        if self._has_come and not self._is_given:
            self._handle(signal.SIGTERM, None)
        self._give_back()

    def _give_back(self) -> None:
        """Restore the previous handlers, unless others have been installed since."""
        if signal.getsignal(signal.SIGCHLD) == self._handle_child:
            signal.signal(signal.SIGCHLD, self._of_children)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)


def _after_fork() -> None:
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Termination) and _is_loader_s():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_heed, args=[os.getppid()], name="datastates-sigterm", daemon=True).start()


def _is_loader_s() -> bool:
    """Whether torch's data loader has forked this process, as its worker."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.data.dataloader":
        frame = frame.f_back
    return frame is not None


def _heed(parent: int) -> None:
    """In a worker, end at a SIGTERM of its own program, or once that has ended; ignore a scheduler's."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == parent:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_after_fork)
