"""A link carries bytes between two ranks as they are, or says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from datastates.errors import CommitError, UnreachableError
from datastates.ranks import link as link_module
from datastates.ranks.link import Link

distributed = pytest.importorskip("torch.distributed")


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_MESSAGE", 1000)


@pytest.fixture
def linked() -> Callable[..., list[Any]]:
    """Call a function with each end of a link, at once; gives what each has returned or raised."""

    def run(*do: Callable[[Link], Any], silence: float = 20) -> list[Any]:
        store = distributed.HashStore()

        def end(rank: int) -> Any:
            try:
                link = Link(store, "test", rank + 3, 4 - rank, silence=silence)
                try:
                    return do[rank](link)
                finally:
                    link.close()
            except Exception as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(end, range(2)))

    return run


def bytes_of(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 999, 1000, 1001, 2000, 5003])
@pytest.mark.parametrize("piece", [1, 333, 1000, 7000])
def test_bytes_come_as_they_are(nbytes: int, piece: int, linked: Any) -> None:
    data = bytes_of(nbytes)
    pieces = [data[at : at + piece] for at in range(0, nbytes, piece)]

    def send(link: Link) -> None:
        assert link.hear() == 2**62 + nbytes
        link.send([b"", *pieces, b""], nbytes)
        link.send(pieces[:1], len(b"".join(pieces[:1])))  # a link is used again

    def receive(link: Link) -> bytes:
        link.tell(2**62 + nbytes)
        found = b"".join(map(bytes, link.receive(nbytes)))
        return found + b"".join(map(bytes, link.receive(min(piece, nbytes))))

    assert linked(send, receive) == [None, data + data[:piece]]


def test_what_stops_the_sender_is_told(linked: Any) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes_of(2500)
        raise ZeroDivisionError("it is damaged")

    sent, received = linked(lambda link: link.send(pieces(), 9000), lambda link: [*link.receive(9000)])
    assert isinstance(sent, ZeroDivisionError)
    assert isinstance(received, CommitError)
    assert "rank 3 could not send it" in str(received)
    sent, received = linked(lambda link: link.send([b"abc"], 4), lambda link: [*link.receive(4)])
    assert isinstance(sent, CommitError)
    assert "ended 1 bytes too early" in str(sent)
    assert isinstance(received, CommitError)


@pytest.mark.parametrize("at", [0, 999, 1000, 1004])
def test_damage_on_the_way_is_noticed(at: int, linked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Link._send

    def damaging(link: Link, message: Any) -> Any:
        if message.numel() > 500:
            message[at] ^= 1
        return send(link, message)

    monkeypatch.setattr(Link, "_send", damaging)
    _, received = linked(lambda link: link.send([bytes_of(2000)], 2000), lambda link: [*link.receive(2000)])
    assert isinstance(received, CommitError)
    assert "what rank 3 has sent was damaged on the way" in str(received)


def test_a_silent_rank_ends_it(linked: Any) -> None:
    waits: list[Any] = []

    def silent(link: Link) -> None:
        while not waits:
            pass

    def receive(link: Link) -> Any:
        try:
            return [*link.receive(3000)]
        finally:
            waits.append(None)

    _, received = linked(silent, receive, silence=0.5)
    assert isinstance(received, UnreachableError)
    assert "rank 3 cannot be reached, or is silent: Timed out waiting 500ms" in str(received)


def test_a_rank_that_leaves_ends_it(linked: Any) -> None:
    sent, _ = linked(lambda link: [link.send([bytes_of(10**7)], 10**7) for _ in range(20)], lambda link: None)
    assert isinstance(sent, UnreachableError)


def test_a_rank_that_does_not_come() -> None:
    with pytest.raises(UnreachableError, match="rank 1 cannot be reached, or is silent"):
        Link(distributed.HashStore(), "alone", 0, 1, silence=0.3)
