"""A board in torch's Store, where the ranks of torch.distributed met. It never waits for a key of the Store."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

from datastates.ranks.store_calls import StoreCalls

# TCPStore refuses a value of more than 8 MiB, and closes the connection
PIECE = 4 << 20
_KEYS_AT_ONCE = 64


class StoreBoard:
    """A :class:`~datastates.ranks.board_world.Board` in a Store.

    A message's key holds the number of its further pieces (4 bytes), then its first piece. Each further piece has a key
    of its own. The marks of a box are a counter.
    """

    def __init__(self, calls: StoreCalls, space: str, *, leave: Callable[[bool], None] = lambda given_up: None) -> None:
        """Use a Store.

        Args:
            calls: This rank's calls of the Store. :meth:`close` closes them.
            space: A name that sets this board apart from others in the same Store; the same on all ranks.
            leave: :meth:`close` calls it with its ``given_up``, before it closes ``calls``.
        """
        self._call = calls
        self._rank = calls.rank
        self._space = f"datastates/{space}"
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
                self._run = self._call("compare_set", f"{self._space}/run", "", secrets.token_hex(8)).decode()
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
            self._call("set", f"{key}/{number}", data[begin : begin + PIECE])
        self._call("set", key, len(pieces).to_bytes(4, "little") + data[:PIECE])
        self.mark(box)

    def mark(self, box: str) -> None:
        """Leave this rank's mark without a message."""
        self._call("add", self._key(box, "marks"), 1)

    def marks(self, box: str) -> int:
        """How many ranks have left a mark."""
        return int(self._call("add", self._key(box, "marks"), 0))

    def read(self, box: str, ranks: Iterable[int]) -> dict[int, bytes]:
        """The messages of those ``ranks`` that have left one, by rank."""
        by_key = {self._key(box, rank): rank for rank in ranks}
        found = {}
        for key, head in self._get(self._present(list(by_key))).items():
            pieces = [f"{key}/{n}" for n in range(1, 1 + int.from_bytes(head[:4], "little"))]
            found[by_key[key]] = b"".join([head[4:], *self._get(pieces).values()])
        return found

    def _present(self, keys: list[str]) -> list[str]:
        """Those keys that exist. Takes few calls if nearly all do."""
        if not keys or self._call("check", keys):
            return keys
        if len(keys) == 1:
            return []
        half = len(keys) // 2
        return self._present(keys[:half]) + self._present(keys[half:])

    def _get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of keys, all of which must exist."""
        values: list[bytes] = []
        for begin in range(0, len(keys), _KEYS_AT_ONCE):
            values += self._call("multi_get", keys[begin : begin + _KEYS_AT_ONCE])
        return dict(zip(keys, values, strict=True))

    def claim(self, box: str) -> int:
        """Claim a box; returns the rank that claimed it first."""
        return int(self._call("compare_set", self._key(box, "claim"), "", str(self._rank)))

    def take_back(self, box: str) -> None:
        """Delete this rank's message."""
        self._delete(self._key(box, self._rank))

    def drop(self, box: str, ranks: Iterable[int]) -> None:
        """Delete the box: its marks, its claim, and the messages of these ranks."""
        with self._lock:
            mine = set(self._pieces)
        keys = [self._key(box, rank) for rank in ranks]
        for key in [k for k in keys if k in mine] + self._present([k for k in keys if k not in mine]):
            self._delete(key)
        for what in ("marks", "claim"):
            self._call("delete_key", self._key(box, what))

    def _delete(self, key: str) -> None:
        with self._lock:
            pieces = self._pieces.pop(key, None)
        if pieces is None:
            pieces = int.from_bytes(self._get([key])[key][:4], "little")
        for name in (key, *(f"{key}/{n}" for n in range(1, 1 + pieces))):
            self._call("delete_key", name)

    def close(self, *, given_up: bool) -> None:
        """Close the calls of the Store; on rank 0, delete the run's name first."""
        try:
            if self._rank == 0 and self._run is not None:
                self._call("delete_key", f"{self._space}/run")
        finally:
            try:
                self._leave(given_up)
            finally:
                self._call.close()
