"""A store whose server is gone before a rank has a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from datastates.errors import UnreachableError
from datastates.ranks.torch_keys import TorchKeys


class Gone:
    """A store of which ``clone()`` ends as the one of a killed server."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def clone(self) -> Any:
        self._ended.wait()
        raise RuntimeError("The client socket has timed out\nException raised from throwTimeoutError")


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_connection_that_is_not_made_in_time_is_given_up(ended: threading.Event) -> None:
    with pytest.raises(UnreachableError, match=r"out of rank 1's reach \(no answer within 0.05 s\)"):
        TorchKeys(Gone(ended), 1, silence=0.05)


def test_a_connection_that_fails_is_named(ended: threading.Event) -> None:
    ended.set()
    with pytest.raises(UnreachableError, match=r"out of rank 1's reach \(The client socket has timed out\)"):
        TorchKeys(Gone(ended), 1, silence=60)
