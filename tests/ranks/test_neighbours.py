"""Connections between ranks of one host."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from datastates.ranks.neighbours import Listener, by_host, ranks_beside, ranks_in


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    """Listeners of five ranks."""
    name = secrets.token_hex(8)
    made = [Listener(name, rank, 20) for rank in range(5)]
    yield made
    for listener in made:
        listener.close()


def connect(listeners: list[Listener], ranks: list[int]) -> list[dict[int, socket.socket]]:
    """Let these ranks connect to each other."""

    def one(rank: int) -> dict[int, socket.socket]:
        return listeners[rank].connect([other for other in ranks if other != rank])

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_all_ranks_of_a_host_connect_to_each_other_and_swap_messages(listeners: list[Listener]) -> None:
    assert len({listener.host for listener in listeners}) == 1
    connected = connect(listeners, list(range(5)))
    messages = [bytes([rank]) * size for rank, size in enumerate((0, 1, 65536, 65537, 3_000_000))]
    with ThreadPoolExecutor(5) as pool:
        received = list(pool.map(lambda rank: listeners[rank].swap(connected[rank], messages[rank]), range(5)))
    for rank, got in enumerate(received):
        assert got == {other: message for other, message in enumerate(messages) if other != rank}
    for one in itertools.chain(*(sockets.values() for sockets in connected)):
        one.close()


def test_a_name_is_used_once(listeners: list[Listener]) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener(listeners[0]._name, 0, 20)


def test_a_rank_that_does_not_listen_cannot_be_reached(listeners: list[Listener]) -> None:
    listeners[0].close()
    with pytest.raises(ConnectionRefusedError):
        listeners[1].connect([0])


def test_a_rank_that_begins_to_listen_late_is_reached() -> None:
    name, refused = secrets.token_hex(8), threading.Event()

    def reach(listener: Listener) -> dict[int, socket.socket]:
        with pytest.raises(ConnectionRefusedError):
            listener.connect([0])
        refused.set()
        return listener.connect([0], within=20)

    with ThreadPoolExecutor(1) as pool, contextlib.closing(Listener(name, 1, 20)) as early:
        reached = pool.submit(reach, early)
        assert refused.wait(20)
        with contextlib.closing(Listener(name, 0, 20)) as late:
            connected = late.connect([1], within=20)
        for one in (*connected.values(), *reached.result().values()):
            one.close()


def test_a_rank_that_never_listens_is_not_waited_for() -> None:
    with contextlib.closing(Listener(secrets.token_hex(8), 1, 20)) as one, pytest.raises(ConnectionRefusedError):
        one.connect([0], within=0.05)


def test_the_ranks_of_each_host_are_told_in_stretches() -> None:
    hosts = {rank: "a" if rank in (0, 1, 2, 7, 9, 10) else "b" for rank in range(12) if rank != 5}
    found = by_host(hosts)
    assert found == [[(0, 3), (7, 1), (9, 2)], [(3, 2), (6, 1), (8, 1), (11, 1)]]
    assert [ranks_in(host) for host in found] == [(0, 1, 2, 7, 9, 10), (3, 4, 6, 8, 11)]
    assert [ranks_beside(rank, found) for rank in (9, 3, 5)] == [(0, 1, 2, 7, 9, 10), (3, 4, 6, 8, 11), ()]


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    listener = Listener(secrets.token_hex(8), 0, timeout=0.05)
    with pytest.raises(TimeoutError):
        listener.connect([1])
    listener.close()


def test_a_rank_that_is_not_expected_is_refused(listeners: list[Listener]) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(listeners[2].connect, [0])
        with pytest.raises(ConnectionError, match="rank 2 is not expected"):
            listeners[0].connect([1])
        for one in other.result().values():
            one.close()


def test_a_rank_that_leaves_while_messages_are_swapped_is_an_error(listeners: list[Listener]) -> None:
    first, second = connect(listeners, [0, 1])
    second[0].close()
    with pytest.raises(OSError, match=r"closed|reset|pipe"):
        listeners[0].swap(first, b"x" * 1_000_000)
    first[1].close()


def test_another_users_process_is_not_connected(listeners: list[Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = os.geteuid
    name = secrets.token_hex(8)
    listener = Listener(name, 0, timeout=0.05)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(listener._address(0))
    monkeypatch.setattr(os, "geteuid", lambda: real() + 1)  # as if the others were of another user
    with pytest.raises(TimeoutError):
        listener.connect([1])
    with pytest.raises(PermissionError):
        listeners[1].connect([0])
    listener.close()
    stranger.close()
