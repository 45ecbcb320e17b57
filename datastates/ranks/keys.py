"""A framework's store that all ranks reach: keys with values, for boards and rounds, and bounded calls of the store."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from datastates._base.tasks import Task
from datastates._base.workers import start
from datastates.errors import UnreachableError
from datastates.ranks.link import Link


class Keys(Protocol):
    """One rank's calls of a framework's store.

    No method waits for a key. All are thread-safe, and raise UnreachableError when the store cannot be reached.

    Attributes:
        rank: This rank.
    """

    rank: int

    def set(self, key: str, data: bytes) -> None:
        """Set the value of a key, in place of an older value."""

    def first(self, key: str, text: str) -> str:
        """Set the value of a key, a text that is not empty, unless the key has a value. Returns the key's value."""

    def found(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of these ``keys``, in their order, without absent ones. No rank may delete any during the call."""

    def mark(self, key: str) -> None:
        """Leave this rank's mark at a key, which has no value. A rank leaves it once."""

    def marks(self, key: str) -> int:
        """The number of ranks that have left a mark at a key."""

    def delete(self, key: str) -> None:
        """Delete a key with its value or its marks, if it is there."""

    def close(self) -> None:
        """End the calls. Later calls raise UnreachableError."""


@dataclass(frozen=True)
class Place:
    """A framework's store where its ranks meet, and the way to connect to it."""

    rank: int
    size: int
    """The number of ranks, at least 2."""
    store: Any
    """An object that exists as long as the store does, and can be referenced weakly."""
    keys: Callable[[float], Keys]
    """Connects to the store. Its argument: seconds to wait for an answer before the server counts as gone."""
    link: Callable[[str, int, float], Link] | None = None
    """Makes one end of a link of a name to another rank, with a time-out in seconds; None: there are no links."""
    refuses_by_itself: bool = False
    """Whether calls fail, with the remedy, once the framework's ranks have changed."""


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
