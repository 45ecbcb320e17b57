"""JAX's coordination service in this process, for threads that act as ranks."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from datastates.ranks.jax_keys import Service


class Coordination:
    """A server and its only client.

    Attributes:
        service: What the ranks call. They may share a client, which several threads may call at once.
    """

    def __init__(self) -> None:
        pytest.importorskip("jax", reason="JAX is not installed: its coordination service was NOT tried")
        from jax._src.lib import _jax

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._server: Any = _jax.get_distributed_runtime_service(address, 1)
        self._client: Any = _jax.get_distributed_runtime_client(address, 0, shutdown_on_destruction=False)
        self._client.connect()
        self.service = Service(lambda: self._client)

    def num_keys(self) -> int:
        """How many keys of this package are left."""
        return len(self._client.key_value_dir_get_bytes("datastates/"))

    def end(self) -> None:
        """Shut the client down, then the server."""
        self._client.shutdown()
        self._server.shutdown()
