"""One rank's calls of a store. The wait for each is bounded, even if the server no longer answers."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from datastates._base.tasks import Task
from datastates._base.workers import start
from datastates.errors import UnreachableError


class StoreCalls:
    """A framework's store, and the thread that calls it. Thread-safe.

    Nothing can interrupt a call, but the caller can stop waiting for it.
    """

    def __init__(self, connect: Callable[[], object], rank: int, *, silence: float, name: str) -> None:
        """Start the thread, and connect in it.

        Args:
            connect: Returns the object to call. It and the object's methods raise RuntimeError when the server fails,
                and UnreachableError when this rank has left it.
            rank: This rank.
            silence: Seconds to wait for an answer before the server counts as gone.
            name: The name of the store in messages.

        Raises:
            UnreachableError: ``connect`` did not return in time, or failed.
        """
        self._rank = rank
        self._silence = silence
        self._name = name
        self._stuck: Task[Any] | None = None
        self._calls: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stop = weakref.finalize(self, self._calls.put, None)
        self._stop.atexit = False
        # a daemon: a server that never answers must not keep the interpreter from ending
        start(threading.Thread(target=_serve, args=(self._calls,), name="datastates-store", daemon=True))
        try:
            self._store = self._ask(connect)
        except BaseException:
            self._stop()
            raise

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store.

        Raises:
            UnreachableError: The store did not answer in time, or failed, or these calls are closed.
        """
        return self._ask(getattr(self._store, method), *arguments)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        answer: Task[Any] = Task(partial(function, *arguments))
        try:
            if self._stuck is None or self._stuck.done():  # a call queued behind a stuck one would get no answer
                with self._lock:
                    if not self._stop.alive:  # the thread has ended
                        raise UnreachableError(f"rank {self._rank} has left {self._name}")
                    self._calls.put(answer)
                return answer.result(self._silence)
            why = "an earlier call has no answer"
        except TimeoutError:
            if answer.take() is None:
                self._stuck = answer
            why = f"no answer within {self._silence:.3g} s"
        except UnreachableError:
            raise  # it is this rank that has left the store
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        raise UnreachableError(
            f"{self._name} is out of rank {self._rank}'s reach ({why}): "
            "the process that hosts it, most often rank 0 or its launcher, may have ended"
        )

    def close(self) -> None:
        """End the thread once the calls before this have returned. Later calls raise UnreachableError."""
        with self._lock:
            self._stop()


def _serve(calls: queue.SimpleQueue[Task[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        if (make := call.take()) is not None:
            make()
        del call, make
