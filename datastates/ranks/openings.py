"""Which opening of a directory the ranks are at, where they meet in torch's Store.

Rank 0 numbers its openings, and keeps the numbers of those that may be entered in one key of the Store. One that it has
closed may be entered until it begins the next, as another rank may come late; one that it has given up may not. Each
other rank takes the lowest number above the last one that it took. So ranks agree, whatever has failed before on some.
"""

from __future__ import annotations

import threading
import time

from datastates.errors import RanksMissingError
from datastates.ranks.board_world import COORDINATOR
from datastates.ranks.polling import until
from datastates.ranks.store_calls import StoreCalls


class Openings:
    """Those of one name in one Store, as one rank counts them. Thread-safe."""

    def __init__(self, name: str) -> None:
        """None has been yet."""
        self._name = name
        self._key = f"datastates/{name}/openings"
        self._last = 0
        self._standing: list[int] = []
        """On rank 0: those that others may enter."""
        self._closed: set[int] = set()
        """On rank 0: those of them that end when the next begins."""
        self._line: list[object] = []
        """Who wants a number, in the order of their calls."""
        self._changed = threading.Condition()

    def queue(self) -> object:
        """Stand in line; what is returned is to be given to :meth:`enter` or :meth:`leave`."""
        place = object()
        with self._changed:
            self._line.append(place)
        return place

    def leave(self, place: object) -> None:
        """Stand in line no more."""
        with self._changed:
            self._line.remove(place)
            self._changed.notify_all()

    def enter(self, place: object, call: StoreCalls, timeout: float, interval: float) -> int:
        """Begin one as rank 0, or wait for rank 0, with a look every ``interval`` seconds; returns its number.

        Raises:
            RanksMissingError: Rank 0 did not open it within ``timeout`` seconds.
            CommitError: The Store cannot be reached.
        """
        end = time.monotonic() + timeout
        try:
            with self._changed:
                first = self._changed.wait_for(lambda: self._line[0] is place, timeout)
            if first and call.rank == COORDINATOR:
                return self._begin(call)
            number = until(lambda: self._look(call), end, interval) if first else None
            if number is None:
                text = f"{self._name}: rank {COORDINATOR} did not open it within {timeout:.3g} s"
                raise RanksMissingError(text, ranks=(COORDINATOR,))
            self._last = number
            return number
        finally:
            self.leave(place)

    def end(self, call: StoreCalls, number: int, given_up: bool) -> None:
        """As rank 0, let nobody enter that one: once the next has begun, or at once if it was given up.

        Raises:
            CommitError: The Store cannot be reached.
        """
        with self._changed:
            if given_up and number in self._standing:
                self._publish(call, [n for n in self._standing if n != number])
            elif number in self._standing:
                self._closed.add(number)

    def _begin(self, call: StoreCalls) -> int:
        with self._changed:
            number = self._last + 1
            self._publish(call, [*(n for n in self._standing if n not in self._closed), number])
            self._last = number
            self._closed.clear()
            return number

    def _publish(self, call: StoreCalls, standing: list[int]) -> None:
        call("set", self._key, ",".join(map(str, standing)) or _NONE)
        self._standing = standing

    def _look(self, call: StoreCalls) -> int | None:
        # one question, whether the key is there or not: it sets nothing, and a key that is not there gives what it said
        standing = call("compare_set", self._key, _NONE, _NONE).decode()
        return next((n for n in map(int, standing.split(",")) if n > self._last), None) if standing != _NONE else None


_NONE = "-"
