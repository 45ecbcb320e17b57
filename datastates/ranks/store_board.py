"""A board in a store of keys that all ranks reach, and what keeps them in step there. The board never waits for a key.

All ranks enter the same round of a directory's world. Rank 0 numbers its rounds. One key of the store lists the numbers
that other ranks may enter:

- Rank 0 adds a number when it begins a round.
- A closed round stays in the list until rank 0 begins the next one, because another rank may come late.
- A round that rank 0 has given up leaves the list at once.

Each other rank enters the lowest listed number above the last one that it entered. So the ranks stay in step, even if
an earlier round failed on some of them only.

The server of a store may outlive a process group, and serve the next one: the list is still there then. So a process
goes on counting as long as the server is the same. It recognises the list by the random name at its beginning.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from datastates._base.waiting import Bell
from datastates.errors import RanksMissingError
from datastates.ranks.board_world import COORDINATOR
from datastates.ranks.keys import Keys
from datastates.ranks.polling import until

# torch's TCPStore refuses a value of more than 8 MiB, and closes the connection
PIECE = 2 << 20


class StoreBoard:
    """A :class:`~datastates.ranks.board_world.Board` in a framework's store.

    A message's key holds the number of its further pieces (4 bytes), then its first piece. Each further piece has a key
    of its own.
    """

    def __init__(self, keys: Keys, space: str, *, leave: Callable[[bool], None] = lambda given_up: None) -> None:
        """Use a store.

        Args:
            keys: This rank's calls of the store. :meth:`close` closes them.
            space: A name that sets this board apart from others in the same store; the same on all ranks.
            leave: :meth:`close` calls it with its ``given_up``, before it closes ``keys``.
        """
        self._keys = keys
        self._rank = keys.rank
        self._space = space
        self._leave = leave
        self._lock = threading.Lock()
        self._run: str | None = None
        self._pieces: dict[str, int] = {}
        """The number of further pieces of each message that this rank has left, by its key."""

    @property
    def run(self) -> str:
        """The random name of this run, made by the rank that asks for it first."""
        with self._lock:
            if self._run is None:
                self._run = self._keys.first(f"{self._space}/run", secrets.token_hex(8))
            return self._run

    def _key(self, box: str, what: int | str) -> str:
        return f"{self._space}/{self.run}/{box}/{what}"

    def put(self, box: str, data: bytes) -> None:
        """Leave this rank's message and its mark."""
        key = self._key(box, self._rank)
        pieces = range(PIECE, len(data), PIECE)
        with self._lock:
            self._pieces[key] = len(pieces)
        # the first piece last: a rank that finds it finds all the others
        for number, begin in enumerate(pieces, 1):
            self._keys.set(f"{key}/{number}", data[begin : begin + PIECE])
        self._keys.set(key, len(pieces).to_bytes(4, "little") + data[:PIECE])
        self.mark(box)

    def mark(self, box: str) -> None:
        """Leave this rank's mark without a message."""
        self._keys.mark(self._key(box, "marks"))

    def marks(self, box: str) -> int:
        """The number of ranks that have left a mark."""
        return self._keys.marks(self._key(box, "marks"))

    def read(self, box: str, ranks: Iterable[int]) -> dict[int, bytes]:
        """The messages that any of these ``ranks`` left, by rank."""
        by_key = {self._key(box, rank): rank for rank in ranks}
        return {
            by_key[key]: b"".join([head[4:], *self._keys.found(_further(key, _number(head))).values()])
            for key, head in self._keys.found(by_key).items()
        }

    def claim(self, box: str) -> int:
        """Claim a box; returns the rank that claimed it first."""
        return int(self._keys.first(self._key(box, "claim"), str(self._rank)))

    def take_back(self, box: str) -> None:
        """Delete this rank's message."""
        key = self._key(box, self._rank)
        with self._lock:
            pieces = self._pieces.pop(key)
        self._delete(key, pieces)

    def drop(self, box: str, ranks: Iterable[int]) -> None:
        """Delete the box: its marks, its claim, and the messages of these ranks."""
        keys = [self._key(box, rank) for rank in ranks]
        with self._lock:
            pieces = {key: self._pieces.pop(key) for key in keys if key in self._pieces}
        others = self._keys.found(key for key in keys if key not in pieces)
        for key, number in {**pieces, **{key: _number(head) for key, head in others.items()}}.items():
            self._delete(key, number)
        for what in ("marks", "claim"):
            self._keys.delete(self._key(box, what))

    def _delete(self, key: str, pieces: int) -> None:
        for name in (key, *_further(key, pieces)):
            self._keys.delete(name)

    def close(self, *, given_up: bool) -> None:
        """Close the calls of the store; on rank 0, delete the run's name first."""
        with contextlib.closing(self._keys), contextlib.ExitStack() as leaving:
            leaving.callback(self._leave, given_up)
            if self._rank == 0 and self._run is not None:
                self._keys.delete(f"{self._space}/run")


def _number(head: bytes) -> int:
    """The number of further pieces of a message, from its first piece."""
    return int.from_bytes(head[:4], "little")


def _further(key: str, pieces: int) -> list[str]:
    """The keys of a message's further pieces."""
    return [f"{key}/{n}" for n in range(1, 1 + pieces)]


class Turn:
    """A call's place in a line, from when it is made until :meth:`leave`. Thread-safe.

    An interrupted call leaves the line by dropping it.
    """

    def __init__(self, line: list[object], changed: Bell) -> None:
        """Join the line, which changes as ``changed`` rings."""
        self._line, self._changed, self._place = line, changed, object()
        # first: an interrupt may come next
        self._dropped = weakref.finalize(self, _leave, line, changed, self._place)
        self._dropped.atexit = False
        line.append(self._place)

    def wait(self, timeout: float) -> bool:
        """Wait until this is the first in line; False if it is not after ``timeout`` seconds."""
        return self._changed.wait_for(lambda: self._line[0] is self._place, timeout)

    def leave(self) -> None:
        """Leave the line. Idempotent."""
        _leave(self._line, self._changed, self._place)
        self._dropped.detach()


def _leave(line: list[object], changed: Bell, place: object) -> None:
    with contextlib.suppress(ValueError):
        line.remove(place)
    changed.ring()


class Rounds:
    """One process's count of the rounds of one name, in the store that it uses now. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Start with no rounds."""
        self._name = name
        self._key = f"{name}/rounds"
        self._server = ""
        """The name of the list that the count belongs to."""
        self._last = 0
        self._standing: dict[int, weakref.ref[Keys]] = {}
        """On rank 0: the rounds that other ranks may enter. An interrupted one has dropped its calls of the store."""
        self._closed: set[int] = set()
        """On rank 0: the rounds in ``_standing`` that leave the list when the next round begins."""
        self._line: list[object] = []
        """The calls of this process that wait for a number, in their order."""
        self._changed = Bell()
        self._lock = threading.Lock()

    def queue(self) -> Turn:
        """Join the line; returns the turn to pass to :meth:`enter`."""
        return Turn(self._line, self._changed)

    def enter(self, turn: Turn, keys: Keys, timeout: float, interval: float) -> int:
        """Begin a round as rank 0, or wait until rank 0 has begun one; returns its number.

        Args:
            turn: From :meth:`queue`. The call waits until it is the first in line, and leaves the line when it ends.
            keys: This rank's calls of the store.
            timeout: Seconds to wait, in the line and for rank 0 together.
            interval: The longest pause between two looks into the store, in seconds.

        Raises:
            RanksMissingError: Rank 0 did not begin a round within ``timeout`` seconds.
            CommitError: The store cannot be reached.
        """
        end = time.monotonic() + timeout
        try:
            first = turn.wait(timeout)
            if first and keys.rank == COORDINATOR:
                return self._begin(keys)
            number = until(lambda: self._look(keys), end, interval) if first else None
            if number is None:
                text = f"{self._name}: rank {COORDINATOR} did not open it within {timeout:.3g} s"
                raise RanksMissingError(text, ranks=(COORDINATOR,))
            self._last = number
            return number
        finally:
            turn.leave()

    def end(self, keys: Keys, number: int, given_up: bool) -> None:
        """As rank 0, let no rank enter a round any more: at once if ``given_up``, else when the next one begins.

        Raises:
            CommitError: The store cannot be reached.
        """
        with self._lock:
            by = self._standing.get(number)
            if by is None or by() is not keys:
                return  # nobody looks there any more
            if given_up:
                self._publish(keys, {n: by for n, by in self._standing.items() if n != number})
            else:
                self._closed.add(number)

    def _count_in(self, server: str) -> None:
        """Count from the beginning if the list is not the one seen before."""
        if server != self._server:
            self._server, self._last = server, 0
            self._standing.clear()
            self._closed.clear()

    def _begin(self, keys: Keys) -> int:
        server, listed = self._listed(keys)  # another process may have been rank 0 before
        with self._lock:
            self._count_in(server or secrets.token_hex(8))
            number = 1 + max([self._last, *listed])
            kept = {n: by for n, by in self._standing.items() if n not in self._closed and by() is not None}
            self._publish(keys, {**kept, number: weakref.ref(keys)})
            self._last = number
            self._closed.clear()
            return number

    def _publish(self, keys: Keys, standing: dict[int, weakref.ref[Keys]]) -> None:
        keys.set(self._key, ",".join([self._server, *map(str, standing)]).encode())
        self._standing = standing

    def _look(self, keys: Keys) -> int | None:
        server, listed = self._listed(keys)
        if server:
            self._count_in(server)
        return next((n for n in listed if n > self._last), None)

    def _listed(self, keys: Keys) -> tuple[str, list[int]]:
        """The name of the list, and the numbers in it. Without a list, the name is empty."""
        server, *numbers = keys.found([self._key]).get(self._key, b"").decode().split(",")
        return server, list(map(int, numbers))
