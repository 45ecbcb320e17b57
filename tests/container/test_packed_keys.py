"""Packed keys are text; a look-up finds each one and notices equal ones, even where hashes collide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datastates.container.key_table import KeyLookup, PackedKeys
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
    again = PackedKeys(packed.data, packed.nbytes)
    assert list(again) == strings
    assert (again.hashes() == packed.hashes()).all()


@given(st.lists(TEXT, min_size=2, max_size=20))
@example(["", "\x01", "\x02\x00"])  # bytes that are the number of bytes
def test_equal_keys_have_one_hash_and_others_their_own(strings: list[str]) -> None:
    hashes = PackedKeys.of(strings).hashes().tolist()
    assert len(set(hashes)) == len(set(strings))
    assert hashes[0] == PackedKeys.of(strings[:1]).hashes()[0]


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


def lookup_of(rows: list[tuple[int, str]], providers: list[str]) -> KeyLookup:
    return KeyLookup(providers, np.array([p for p, _ in rows], np.uint32), PackedKeys.of([k for _, k in rows]))


@pytest.mark.parametrize("collide", [False, True])
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), LETTERS), unique=True, max_size=30),
    others=st.lists(LETTERS, max_size=10),
)
def test_a_row_is_found_by_its_full_key_only(collide: bool, rows: list[tuple[int, str]], others: list[str]) -> None:
    providers = ["a", "a/b", "", "é"]
    expected = {full_key(providers[p], key): i for i, (p, key) in enumerate(rows)}
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(
                "datastates.container.key_table._hashes", lambda provider, keys: np.zeros(len(keys), np.uint64)
            )
        found = lookup_of(rows, providers)
        assert dict(found) == expected
        assert list(found) == list(expected)
        assert found.repeated == []
        for other in [*others, *(key + "/" for key in expected), *(key + "x" for key in expected)]:
            assert found.get(other) == expected.get(other)
        asked = [*others, *expected]
        assert found.find(asked) == {key: [expected[key]] for key in asked if key in expected}


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("key", ["", "weight", "é" * 200])
def test_the_same_key_twice_is_noticed(collide: bool, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if collide:
        monkeypatch.setattr(
            "datastates.container.key_table._hashes", lambda provider, keys: np.zeros(len(keys), np.uint64)
        )
    assert lookup_of([(0, key), (1, key), (0, "other")], ["a", "b"]).repeated == []
    found = lookup_of([(0, key), (1, key), (0, "other"), (1, key)], ["a", "b"])
    assert found.repeated == [[1, 3]]
    assert list(found) == [full_key("a", key), full_key("b", key), "a/other"]
    assert len(found) == 3
    assert found.find([full_key("b", key)]) == {full_key("b", key): [1, 3]}
    assert found[full_key("b", key)] == 1


def test_what_is_no_text_is_no_key() -> None:
    found = lookup_of([(0, "")], [""])
    assert 5 not in found
    assert None not in found
    assert list(found) == ["~4"]
