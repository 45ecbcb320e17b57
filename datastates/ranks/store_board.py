"""A board in a store of keys that all ranks reach. It never waits for a key."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable

from datastates.ranks.keys import Keys

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
