"""Threads for work in the background. Work is handed over in one step, which no interrupt can cut in two.

``concurrent.futures`` is not used: an interrupt within ``submit()`` may leave one of its locks taken for ever, and it
takes no work once the main thread has ended, though another thread of the program may still train.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable

from datastates._base import log
from datastates._base.waiting import Flag
from datastates.errors import ClosedError, ThreadStartError


class Work:
    """A call that is made once, by whoever takes it first. Thread-safe."""

    def __init__(self, call: Callable[[], object]) -> None:
        """Wrap a call."""
        self._call = [call]

    def take(self) -> Callable[[], object] | None:
        """The call, for the first that asks; None for all others."""
        try:
            return self._call.pop()
        except IndexError:
            return None


_Queue = queue.SimpleQueue[Work | None]


class Workers:
    """Does work on threads of its own, which start when they are needed. Thread-safe, also in a signal handler.

    Work begins in the order in which it was put. The end of the interpreter waits for it. The threads end after
    :meth:`stop`, and also once nobody holds this object any more. A forked child has none of its parent's threads and
    work: there, new threads do new work.
    """

    def __init__(self, name: str, most: int) -> None:
        """Prepare for at most ``most`` threads, whose names begin with ``name``; none is started yet."""
        self._name = name
        self._most = most
        self._is_stopped = False
        self._begin()
        _every[next(_numbers)] = self

    def _begin(self) -> None:
        self._queue: _Queue = queue.SimpleQueue()
        self._idle: list[None] = []
        """An entry for each thread that waits, and that no work is on its way to."""
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._queue.put, None).atexit = False

    def put(self, work: Work) -> None:
        """Let a thread do work. If this raises anything but an interrupt, it is not done.

        Raises:
            ThreadStartError: There is no thread, and none could be started.
            ClosedError: :meth:`stop` was called.
        """
        if self._is_stopped:
            raise ClosedError(f"{self._name}: its threads have ended")
        # a thread first: an interrupt must not leave work that no thread will do
        try:
            self._idle.pop()
        except IndexError:
            if len(self._threads) < self._most:
                self._start()
        self._queue.put(work)
        if self._is_stopped and work.take() is not None:  # stopped meanwhile
            raise ClosedError(f"{self._name}: its threads have ended")

    def do(self, call: Callable[[], object]) -> None:
        """As :meth:`put`, for a call that nobody else may take."""
        self.put(Work(call))

    def _start(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=_serve, args=(self._queue, self._idle), name=name, daemon=True)
        try:
            start(thread, self._threads.append)
        except ThreadStartError:
            if not self._threads:
                raise

    def stop(self) -> None:
        """Let the threads end once they have done what was put before. Idempotent."""
        self._is_stopped = True
        self._queue.put(None)

    def join(self) -> None:
        """After :meth:`stop`, wait until the threads have ended, except the one that calls this."""
        for thread in self._threads.copy():
            if thread is not threading.current_thread():
                thread.join()

    def is_current(self) -> bool:
        """Whether one of the threads calls this."""
        return threading.current_thread() in self._threads

    def wait_done(self) -> None:
        """Wait until what was put before is done. Not for several threads at once, nor for threads of this object."""
        if self._is_stopped:
            self.join()
            return
        threads, came, all_came = len(self._threads), list[None](), Flag()

        def meet() -> None:
            came.append(None)
            if len(came) == threads:
                all_came.set()
            all_came.wait()

        for _ in range(threads):
            with contextlib.suppress(IndexError):
                self._idle.pop()
            self._queue.put(Work(meet))
        if threads:
            all_came.wait()


def _serve(work: _Queue, idle: list[None]) -> None:
    ends = False
    one = work.get()  # it is on its way: the thread was started for it
    while True:
        if one is None:
            ends = True
        elif (call := one.take()) is not None:
            _make(call)
            del call  # what it holds must not live until there is more to do
        del one
        try:
            one = work.get_nowait()
        except queue.Empty:
            if ends:
                break
            idle.append(None)
            one = work.get()
    work.put(None)  # for the next thread


def _make(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException as error:  # the thread has other work to do
        log.error("work in the background has failed", of=error)


def start(thread: threading.Thread, started: Callable[[threading.Thread], object] = lambda thread: None) -> None:
    """Start a thread, and call ``started`` with it. An interrupt of this call does not hurt the thread.

    Raises:
        ThreadStartError: The system refuses a thread.
    """
    told: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

    def begin() -> None:
        # on a thread, as Thread.start() waits for the new one: an interrupt there would lock that out
        try:
            thread.start()
        except RuntimeError as error:
            told.put(error)
        else:
            started(thread)
            told.put(None)

    try:
        _thread.start_new_thread(begin, ())
        refusal = told.get()
    except RuntimeError as error:
        refusal = error
    if refusal is not None:
        raise ThreadStartError(f"{thread.name}: {refusal}") from refusal


_every: weakref.WeakValueDictionary[int, Workers] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _after_fork() -> None:
    for workers in list(_every.values()):  # a thread of the parent may have held one that nobody else holds
        workers._begin()


os.register_at_fork(after_in_child=_after_fork)


_ending = Flag()


def is_ending() -> bool:
    """Whether the interpreter ends: work that would go on for ever must stop."""
    return _ending.is_set()


def finish() -> None:
    """Wait until all work of this process is done, at the end of the interpreter."""
    _ending.set()
    for _ in range(2):  # what is done may put further work, most often to workers that were made later
        for _, workers in sorted(_every.items()):
            workers.wait_done()


# Twice. First when the main thread ends, before exit functions take away what the work needs; there is no public way to
# that place, which concurrent.futures uses. Then for what other threads and exit functions have put since.
with contextlib.suppress(RuntimeError):  # imported by a thread that has outlived the main thread
    threading._register_atexit(finish)  # type: ignore[attr-defined]
atexit.register(finish)
