"""Packed keys are text; a table finds each row by its full key, and notices equal ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.container.key_table import PackedKeys
from datastates.container.table import ShardTable
from datastates.errors import FormatError
from datastates.state.shards import full_key

TEXT = st.text(st.characters(codec=None), max_size=12) | st.sampled_from(
    ["", "a" * 255, "a" * 256, "b" * 257, "é" * 400]
)
# few letters, so that full keys of different providers look alike: prefixes, escapes and provider names
LETTERS = st.text("ab/~é\ud800", max_size=4)


@given(st.lists(TEXT, max_size=20))
def test_packed_keys_are_the_strings(strings: list[str]) -> None:
    packed = PackedKeys.of(strings)
    assert list(packed) == [packed[i] for i in range(len(packed))] == packed[:] == strings
    assert packed.data == b"".join(s.encode("utf-8", "surrogatepass") for s in strings)
    assert packed.some(np.arange(len(strings))[::2]) == strings[::2]
    assert list(PackedKeys(packed.data, packed.nbytes)) == strings


@pytest.mark.parametrize(
    ("data", "nbytes"),
    [
        (b"\xff", [1]),
        (b"\xc0\xaf", [2]),
        ("é".encode(), [1, 1]),
        ("aé".encode(), [2, 0, 1]),
        ("é".encode() + b"\xed\xa0\x80", [2, 1, 2]),
        (b"abc", [1, 1]),
        (b"", [1]),
        (b"a", []),
    ],
)
def test_keys_that_are_not_text_or_do_not_add_up_are_refused(data: bytes, nbytes: list[int]) -> None:
    with pytest.raises(FormatError, match="keys"):
        PackedKeys(data, np.array(nbytes, np.uint32))


def table_of(rows: list[tuple[int, str]], providers: list[str]) -> ShardTable:
    n = len(rows)
    byte, none = np.zeros(n, np.uint8), np.zeros(0, np.uint64)
    return ShardTable(
        providers=tuple(providers),
        provider=np.array([p for p, _ in rows], np.uint32),
        keys=PackedKeys.of([k for _, k in rows]),
        kind=byte,
        dtype=byte,
        record=np.zeros(n, np.uint32),
        offset=np.zeros(n, np.uint64),
        part=byte,
        ndim=byte,
        dims=none,
        strides=none,
        global_ndim=byte,
        global_dims=none,
        place=none,
        digest=np.zeros(n, np.uint32),
        digested=byte,
    )


def found_in(table: ShardTable, fulls: list[str]) -> list[tuple[str, int]]:
    which, rows = table.find(fulls)
    return [(fulls[i], row) for i, row in zip(which.tolist(), rows.tolist(), strict=True)]


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), LETTERS), unique=True, max_size=30),
    others=st.lists(LETTERS, max_size=10),
)
def test_a_row_is_found_by_its_full_key_only(rows: list[tuple[int, str]], others: list[str]) -> None:
    providers = ["a", "a/b", "", "é"]
    expected = {full_key(providers[p], key): i for i, (p, key) in enumerate(rows)}
    table = table_of(rows, providers)
    assert list(table.by_key.items()) == list(expected.items())
    assert table.parts == {}
    asked = [*others, *(key + "/" for key in expected), *(key + "x" for key in expected), *expected]
    assert found_in(table, asked) == [(key, expected[key]) for key in asked if key in expected]


@pytest.mark.parametrize("key", ["", "weight", "é" * 200])
def test_the_same_key_twice_is_noticed(key: str) -> None:
    assert table_of([(0, key), (1, key), (0, "other")], ["a", "b"]).parts == {}
    table = table_of([(0, key), (1, key), (0, "other"), (1, key)], ["a", "b"])
    assert table.parts == {1: [1, 3]}
    full = full_key("b", key)
    assert list(table.by_key.items()) == [(full_key("a", key), 0), (full, 1), ("a/other", 2)]
    assert found_in(table, [full]) == [(full, 1), (full, 3)]
