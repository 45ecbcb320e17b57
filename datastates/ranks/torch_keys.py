"""Keys in torch's Store, where the ranks of torch.distributed met."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from datastates._base.loaded import loaded
from datastates.errors import SettingsError
from datastates.ranks.keys import Place, StoreCalls
from datastates.ranks.link import Link

_KEYS_AT_ONCE = 64


class TorchKeys:
    """:class:`~datastates.ranks.keys.Keys` in torch's Store. The marks at a key are a counter.

    Attributes:
        rank: This rank.
    """

    def __init__(self, store: Any, rank: int, *, silence: float) -> None:
        """Connect to the Store.

        Args:
            store: A ``torch.distributed.Store``.
            rank: This rank.
            silence: Seconds to wait for an answer before the server counts as gone.

        Raises:
            UnreachableError: The server does not answer.
        """
        self.rank = rank
        # keep this reference: the object may host the server, which ends with it
        self._given = store
        connect = partial(_connection, store, silence)
        self._call = StoreCalls(connect, rank, silence=silence, name="the Store of torch.distributed")

    def set(self, key: str, data: bytes) -> None:
        """Set the value of a key, in place of an older value."""
        self._call("set", _named(key), data)

    def first(self, key: str, text: str) -> str:
        """Set the value of a key, a text that is not empty, unless the key has a value. Returns the key's value."""
        value: bytes = self._call("compare_set", _named(key), "", text)
        return value.decode()

    def found(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of these ``keys``, by key, without absent ones. Takes few calls if nearly all have a value."""
        there = self._present(list(keys))
        values: list[bytes] = []
        for begin in range(0, len(there), _KEYS_AT_ONCE):
            values += self._call("multi_get", [_named(key) for key in there[begin : begin + _KEYS_AT_ONCE]])
        return dict(zip(there, values, strict=True))

    def _present(self, keys: list[str]) -> list[str]:
        if not keys or self._call("check", [_named(key) for key in keys]):
            return keys
        if len(keys) == 1:
            return []
        half = len(keys) // 2
        return self._present(keys[:half]) + self._present(keys[half:])

    def mark(self, key: str) -> None:
        """Leave this rank's mark at a key."""
        self._call("add", _named(key), 1)

    def marks(self, key: str) -> int:
        """The number of ranks that have left a mark at a key."""
        return int(self._call("add", _named(key), 0))

    def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._call("delete_key", _named(key))

    def close(self) -> None:
        """End the calls once all earlier ones have returned. Later calls raise UnreachableError."""
        self._call.close()


def _connection(store: Any, silence: float) -> Any:
    """A further connection to the Store. The training code's own may be locked for long by one of its calls."""
    if not hasattr(store, "clone"):
        return store
    own = store.clone()
    distributed: Any = loaded("torch.distributed")
    # others have no server that could be silent, and may be the training code's own object
    if isinstance(getattr(own, "_underlying_non_prefix_store", own), distributed.TCPStore):
        # multi_get() fails after that, also where the keys are there and only the server is silent
        own.set_timeout(timedelta(seconds=min(silence, threading.TIMEOUT_MAX)))
    return own


def _named(key: str) -> str:
    return f"datastates/{key}"


def place() -> Place | None:
    """The Store where the ranks of torch.distributed meet; None if it is not initialized or has one rank only.

    Raises:
        SettingsError: The backend of torch.distributed has no Store.
    """
    distributed = loaded("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if world_size == 1:
        return None
    store = distributed.distributed_c10d._get_default_store()
    if store is None:
        raise SettingsError("rank: torch.distributed has no Store with this backend; give rank and world_size")
    return Place(
        rank,
        world_size,
        store,
        lambda silence: TorchKeys(store, rank, silence=silence),
        lambda name, other, silence: Link(store, name, rank, other, silence=silence),
    )
