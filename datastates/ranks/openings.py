"""How ranks that meet in a store agree which opening of a directory's world they are at.

Rank 0 numbers its openings. One key of the store lists the numbers that other ranks may enter:

- Rank 0 adds a number when it begins an opening.
- A closed opening stays in the list until rank 0 begins the next one, because another rank may come late.
- An opening that rank 0 has given up leaves the list at once.

Each other rank enters the lowest listed number above the last one that it entered. So the ranks stay in step, even if
an earlier opening failed on some of them only.

The server of a store may outlive a process group, and serve the next one: the list is still there then. So a process
goes on counting as long as the server is the same. The list begins with a random name, by which a process knows it
again.
"""

from __future__ import annotations

import secrets
import threading
import time
from weakref import WeakKeyDictionary

from datastates.errors import RanksMissingError
from datastates.ranks.board_world import COORDINATOR
from datastates.ranks.keys import Keys
from datastates.ranks.polling import until


class Openings:
    """One process's count of the openings of one name, in the store that it uses now. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Start with no openings."""
        self._name = name
        self._key = f"{name}/openings"
        self._server = ""
        """The name of the list that the count belongs to."""
        self._servers: WeakKeyDictionary[Keys, str] = WeakKeyDictionary()
        self._last = 0
        self._standing: list[int] = []
        """On rank 0: the openings that other ranks may enter."""
        self._closed: set[int] = set()
        """On rank 0: those of ``_standing`` that leave the list when the next opening begins."""
        self._line: list[object] = []
        """The calls of this process that wait for a number, in their order."""
        self._changed = threading.Condition()

    def queue(self) -> object:
        """Join the line; returns a place to pass to :meth:`enter` or :meth:`leave`."""
        place = object()
        with self._changed:
            self._line.append(place)
        return place

    def leave(self, place: object) -> None:
        """Leave the line."""
        with self._changed:
            self._line.remove(place)
            self._changed.notify_all()

    def enter(self, place: object, keys: Keys, timeout: float, interval: float) -> int:
        """Begin an opening as rank 0, or wait until rank 0 has begun one; returns its number.

        Args:
            place: From :meth:`queue`. The call waits until it is the first in line, and leaves the line when it ends.
            keys: This rank's calls of the store.
            timeout: Seconds to wait, in the line and for rank 0 together.
            interval: The longest pause between two looks into the store, in seconds.

        Raises:
            RanksMissingError: Rank 0 did not begin an opening within ``timeout`` seconds.
            CommitError: The store cannot be reached.
        """
        end = time.monotonic() + timeout
        try:
            with self._changed:
                first = self._changed.wait_for(lambda: self._line[0] is place, timeout)
            if first and keys.rank == COORDINATOR:
                return self._begin(keys)
            number = until(lambda: self._look(keys), end, interval) if first else None
            if number is None:
                text = f"{self._name}: rank {COORDINATOR} did not open it within {timeout:.3g} s"
                raise RanksMissingError(text, ranks=(COORDINATOR,))
            self._last = number
            return number
        finally:
            self.leave(place)

    def end(self, keys: Keys, number: int, given_up: bool) -> None:
        """As rank 0, let no rank enter an opening any more: at once if ``given_up``, else when the next one begins.

        Raises:
            CommitError: The store cannot be reached.
        """
        with self._changed:
            if self._servers.get(keys) != self._server:
                return  # nobody looks there any more
            if given_up and number in self._standing:
                self._publish(keys, [n for n in self._standing if n != number])
            elif number in self._standing:
                self._closed.add(number)

    def _count_in(self, server: str) -> None:
        """Begin to count anew where the list is another one than before."""
        if server != self._server:
            self._server, self._last = server, 0
            self._standing.clear()
            self._closed.clear()

    def _begin(self, keys: Keys) -> int:
        server, listed = self._listed(keys)  # another process may have been rank 0 before
        with self._changed:
            self._count_in(server or secrets.token_hex(8))
            self._servers[keys] = self._server
            number = 1 + max([self._last, *listed])
            self._publish(keys, [*(n for n in self._standing if n not in self._closed), number])
            self._last = number
            self._closed.clear()
            return number

    def _publish(self, keys: Keys, standing: list[int]) -> None:
        keys.set(self._key, ",".join([self._server, *map(str, standing)]).encode())
        self._standing = standing

    def _look(self, keys: Keys) -> int | None:
        server, listed = self._listed(keys)
        if server:
            self._count_in(server)
        return next((n for n in listed if n > self._last), None)

    def _listed(self, keys: Keys) -> tuple[str, list[int]]:
        """The name of the list, empty where there is none yet, and the numbers in it."""
        server, *numbers = keys.found([self._key]).get(self._key, b"").decode().split(",")
        return server, list(map(int, numbers))
