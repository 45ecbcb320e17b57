"""The reader reads every opcode that the writer writes."""

from __future__ import annotations

import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.container import pickle_reader, pickle_writer
from datastates.state import shards

INTEGERS = st.integers() | st.builds(
    lambda sign, bits, less: sign * ((1 << bits) - less),
    st.sampled_from([1, -1]),
    st.sampled_from([7, 8, 15, 16, 31, 32, 63, 64, 2039, 2040, 2041, 5000]),
    st.sampled_from([0, 1]),
)
SCALARS = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.text(st.characters(categories=["Cs"]), max_size=3)
    | st.binary()
    | st.binary().map(bytearray)
    | st.frozensets(INTEGERS | st.text(), max_size=4)
    | st.sampled_from([range(3), slice(1, None, 2)])
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | INTEGERS | st.tuples(INTEGERS), inner, max_size=5)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
        | st.sets(INTEGERS, max_size=4)
        | inner.map(lambda value: [value, value])
    )


VALUES = st.recursive(SCALARS, containers)


@given(VALUES)
def test_what_is_written_is_read(value: object) -> None:
    found = pickle_reader.loads(pickle_writer.dumps(value))
    assert typed(found) == typed(value)


@given(VALUES, st.integers(1, pickle.HIGHEST_PROTOCOL))
def test_what_another_pickler_writes_is_read(value: object, protocol: int) -> None:
    found = pickle_reader.loads(pickle.dumps(value, protocol))
    assert typed(found) == typed(value)


def typed(value: Any) -> object:
    """A value with its types, which tell 1 from True and from 1.0."""
    if isinstance(value, dict):
        value = list(value.items())
    inner = [typed(item) for item in value] if isinstance(value, (list, tuple)) else value
    return type(value), inner


def cycles() -> list[object]:
    """A short and a long tuple, each with a list that holds the tuple itself."""
    inside: tuple[list[object], ...] = ([], [])
    short, long = (inside[0],), (1, 2, 3, inside[1])
    inside[0].append(short)
    inside[1].append(long)
    return [short, long]


class Made:
    """An object with a state."""

    def __init__(self) -> None:
        self.value = 1


WRITTEN = [
    [1 << 2039, -1 << 2040, 1 << 40, 70_000, -1, 300, 3, 1.5, None, True, False, "a", b"", b"a", bytearray(b"b")],
    [{}, {1: 2}, {1: 2, 3: 4}, [], [1], [1, 2], (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {1}, frozenset([1])],
    [(many := [[i] for i in range(300)]), list(many)],
    [OrderedDict(a=1), Made(), Made, b"b" * 300],
    *cycles(),
]


class MadeByName(Made):
    """One that is made with arguments by name."""

    def __new__(cls, value: int = 0) -> MadeByName:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"value": 1}


def test_every_opcode_that_can_be_written_is_read() -> None:
    """Ours, and those of the protocols 1 to 5: pickles of each that use every opcode of their writers."""
    read = {chr(code) for code in pickle_reader._Reader.dispatch}
    data = [pickle_writer.dumps(value) for value in WRITTEN]
    data += [pickle.dumps(value, protocol) for value in [*WRITTEN, MadeByName()] for protocol in range(1, 6)]
    for stream in data:
        pickle_reader.loads(stream, trust="all")
        pickle_reader.survey(stream, lambda stored: stored, trust="all")
    stored = shards.StoredArray("0", "float32", 0, (2, 70_000), (70_000, 1), 140_000)
    data.append(pickle_writer.dumps([shards.ArrayLeaf("a")], lambda leaf: stored))
    written = {opcode.code for stream in data for opcode, _, _ in pickletools.genops(stream)}
    assert written <= read
    # SHORT_BINSTRING is written by Python 2; the others, by lengths beyond four bytes
    rare = (pickle.SHORT_BINSTRING, pickle.BINBYTES8, pickle.BINUNICODE8)
    assert read - written == {chr(opcode[0]) for opcode in rare}


def test_lengths_of_eight_bytes_are_read() -> None:
    length = (3).to_bytes(8, "little")
    assert pickle_reader.loads(b"\x80\x04" + pickle.BINBYTES8 + length + b"abc.") == b"abc"
    assert pickle_reader.loads(b"\x80\x04" + pickle.BINUNICODE8 + length + b"abc.") == "abc"


@pytest.mark.parametrize("bits", [2038, 2039, 2040, 100_000])
def test_a_long_integer_that_is_cut_off_is_damage(bits: int) -> None:
    data = pickle_writer.dumps(1 << bits)
    for cut in (1, 5, 200):
        with pytest.raises(pickle_reader.FormatError):
            pickle_reader.loads(data[:-cut])
