"""Keys in JAX's coordination service, where the processes of jax.distributed met."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from datastates._base.loaded import loaded
from datastates.errors import UnreachableError
from datastates.ranks.keys import Place, StoreCalls


class Service:
    """The calls of JAX's coordination service that :class:`JaxKeys` needs. Each is one request; none waits for a key.

    A request for a single key would wait or fail where the key is absent, but a folder may be empty. So each key is a
    folder of entries: its value, or its marks.
    """

    def __init__(self, client: Callable[[], Any]) -> None:
        """Use the client that ``client()`` returns at each call, such as ``jax.distributed.initialize`` makes."""
        self._client = client

    def set(self, key: str, entry: str, data: bytes) -> None:
        """Set the content of an entry of a key, in place of older content."""
        self._client().key_value_set_bytes(f"{_folder(key)}/{entry}", data, allow_overwrite=True)

    def set_once(self, key: str, entry: str, data: bytes) -> None:
        """Set the content of an entry of a key, unless it has content."""
        try:
            self._client().key_value_set_bytes(f"{_folder(key)}/{entry}", data)
        except RuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise

    def entries(self, key: str) -> list[bytes]:
        """The contents of all entries of a key."""
        return [content for _, content in self._client().key_value_dir_get_bytes(f"{_folder(key)}/")]

    def delete(self, key: str) -> None:
        """Delete a key with its entries, if it is there."""
        self._client().key_value_delete(_folder(key))


def _folder(key: str) -> str:
    # no "/" of the key's own: the service joins several into one, and deletes all keys below a key with it
    return f"datastates/{quote(key, safe='')}"


_VALUE = "value"


class JaxKeys:
    """:class:`~datastates.ranks.keys.Keys` in JAX's service. The marks at a key are entries, one for each rank.

    Attributes:
        rank: This rank.
    """

    def __init__(self, service: Service, rank: int, *, silence: float) -> None:
        """Begin to call the service.

        Args:
            service: The service. Several threads may call it at once.
            rank: This rank.
            silence: Seconds to wait for an answer before the server counts as gone.
        """
        self.rank = rank
        self._call = StoreCalls(lambda: service, rank, silence=silence, name="JAX's coordination service")

    def set(self, key: str, data: bytes) -> None:
        """Give a key a value, in place of an older one."""
        self._call("set", key, _VALUE, data)

    def first(self, key: str, text: str) -> str:
        """Give a key a value, which is not empty, unless it has one; returns the key's value."""
        while True:
            self._call("set_once", key, _VALUE, text.encode())
            value: list[bytes] = self._call("entries", key)
            if value:  # otherwise, another rank has deleted it in between
                return value[0].decode()

    def found(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of these ``keys``, by key; keys without a value are left out."""
        values = {key: self._call("entries", key) for key in keys}
        return {key: value[0] for key, value in values.items() if value}

    def mark(self, key: str) -> None:
        """Leave this rank's mark at a key."""
        self._call("set", key, str(self.rank), b"")

    def marks(self, key: str) -> int:
        """The number of ranks that have left a mark at a key."""
        return len(self._call("entries", key))

    def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._call("delete", key)

    def close(self) -> None:
        """End the calls once all earlier ones have returned. Later calls raise UnreachableError."""
        self._call.close()


_lock = threading.Lock()


@lru_cache(maxsize=1)
def _service(state: Any, client: Any) -> Service:
    """The service that the client in JAX's global state is connected to."""
    rank: int = state.process_id

    def current() -> Any:
        # after shutdown() and initialize(), another service may answer at the same address. If it hears from a client
        # that it does not know, JAX ends the process
        if state.client is not client:
            raise UnreachableError(
                f"rank {rank} has left JAX's coordination service by jax.distributed.shutdown(): "
                "close the Checkpointer before, and make a new one after jax.distributed.initialize()"
            )
        return client

    return Service(current)


def place() -> Place | None:
    """The store where the processes of jax.distributed meet; None if it is not initialized or has one process only.

    Does not start JAX's devices.
    """
    distributed = loaded("jax._src.distributed")
    if distributed is None or (state := distributed.global_state).client is None or state.num_processes == 1:
        return None
    rank: int = state.process_id
    with _lock:
        service = _service(state, state.client)  # the client itself cannot be referenced weakly
    return Place(
        rank,
        state.num_processes,
        service,
        lambda silence: JaxKeys(service, rank, silence=silence),
        refuses_by_itself=True,
    )
