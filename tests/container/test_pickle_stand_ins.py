"""Pickles of others: what costs memory is bounded by the length of the stream."""

from __future__ import annotations

import pytest

from datastates.container import pickle_stand_ins
from datastates.errors import FormatError


@pytest.mark.parametrize(
    "flood",
    [b"\x8f" * 1_000_000, b"N" + b"\x94" * 1_000_000, b"\x8f(" + b"]" * 3 + b"\x90"],
    ids=["sets", "kept twice", "lists in a set"],
)
def test_a_flood_is_refused(flood: bytes) -> None:
    with pytest.raises(FormatError):
        pickle_stand_ins.read(b"\x80\x04" + flood + b".", {}, lambda _: None)


def test_a_set_is_read() -> None:
    assert pickle_stand_ins.read(b"\x80\x04\x8f\x94(K\x01K\x02\x90.", {}, lambda _: None) == {1, 2}
