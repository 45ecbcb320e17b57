"""The process that hosts the Store is stopped for longer than torch waits by itself: no rank fails for that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from voting import joined, together

from datastates.ranks.board_world import BoardWorld
from datastates.ranks.store_board import StoreBoard
from datastates.ranks.torch_keys import TorchKeys

distributed: Any = pytest.importorskip("torch.distributed", reason="torch is not installed: its Store was NOT tried")

PATIENCE = 0.05
"""Seconds that the training code's Store waits for a key, as ``init_process_group(timeout=)`` may set it."""
CALLS = ["set", "check", "multi_get", "add", "compare_set", "delete_key"]
"""All that a rank calls."""


class Stopping(distributed.TCPStore):  # type: ignore[misc]
    """A connection that stops the server as it makes the first call of a name, for longer than torch waits."""

    calls: ClassVar[dict[str, bool]] = {}
    server = 0

    def __getattribute__(self, name: str) -> Any:
        if Stopping.calls.pop(name, False):
            os.kill(Stopping.server, signal.SIGSTOP)
            threading.Timer(6 * PATIENCE, os.kill, (Stopping.server, signal.SIGCONT)).start()
        return super().__getattribute__(name)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Connects to a server in a process of its own, as ``Store.clone()`` does, and with the timeout of its Store."""
    read, write = os.pipe()
    host = os.fork()
    if host == 0:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        while True:
            signal.pause()
    port = int(os.read(read, 16))
    monkeypatch.setattr(Stopping, "server", host)

    def connected() -> Any:
        store = Stopping("127.0.0.1", port, is_master=False)
        store.set_timeout(timedelta(seconds=PATIENCE))
        return store

    yield connected
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    os.close(read)
    os.close(write)


class Training:
    """The training code's Store."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.clone = connect


def test_ranks_agree_whichever_call_finds_the_host_silent(connect: Callable[[], Any]) -> None:
    worlds = [
        BoardWorld(rank, 2, StoreBoard(TorchKeys(Training(connect), rank, silence=60), "c/1"), timeout=60)
        for rank in range(2)
    ]
    for call in CALLS:
        Stopping.calls[call] = True
        votes = [lambda w=w, call=call: w.agree(call, f"<{w.rank}>".encode(), joined) for w in worlds]
        assert together(*votes) == [b"<0><1>"] * 2, call
    for world in reversed(worlds):
        world.close()
    assert not Stopping.calls, "these were not called"
