"""What other ranks are told of an error, whatever the error is."""

from __future__ import annotations

import pytest

from datastates.ranks.world import SoloWorld
from datastates.restoring.meeting import Meeting, _told


class Odd(Exception):
    lost = 5

    def __str__(self) -> str:
        raise LookupError("no text")


def test_an_error_that_cannot_be_shown_is_raised_as_it_is() -> None:
    def fail() -> None:
        raise Odd

    with pytest.raises(Odd):
        Meeting(SoloWorld(), "restore").together("objects", fail)


def test_what_is_told_of_it_is_its_name() -> None:
    assert b"Odd" in _told(Odd())
