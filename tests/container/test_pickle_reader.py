"""Reading an array's opcodes all at once gives the same as reading them one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.container import pickle_reader, pickle_writer
from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError
from datastates.state import dtypes
from datastates.state.shards import ArrayLeaf, StoredArray

NUMBERS = st.integers(0, 2**61) | st.sampled_from([0, 1, 255, 256, 2**31 - 1, 2**31])
SIZES = st.lists(NUMBERS, max_size=66).map(tuple)
STORED = st.builds(
    StoredArray,
    record=st.integers(0, 10**20).map(str),
    dtype=st.sampled_from(sorted(dtypes.BY_NAME)),
    offset=NUMBERS,
    shape=SIZES,
    stride=SIZES,
    elements=NUMBERS,
    requires_grad=st.booleans(),
)


def read(data: bytes) -> tuple[Any, str]:
    """The value and no text, or None and why it cannot be read."""
    try:
        return pickle_reader.loads(data, lambda stored: ("array", stored)), ""
    except FormatError as error:
        return None, str(error)


def slowly(data: bytes) -> tuple[Any, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle_reader._Reader, "_load_array", lambda self, match: False)
        return read(data)


@given(STORED, st.booleans())
def test_an_array_reads_the_same_at_once(stored: StoredArray, parameter: bool) -> None:
    data = pickle_writer.stream(pickle_writer.encode_array(stored, parameter=parameter))
    found = read(data)
    assert found == slowly(data)
    if len(stored.shape) == len(stored.stride) <= 64 and max(*stored.shape, *stored.stride, 0, 0) < 2**62:
        assert found[0] is not None


@given(STORED, st.integers(0, 400), st.binary(max_size=3))
def test_a_damaged_array_reads_the_same_at_once(stored: StoredArray, at: int, change: bytes) -> None:
    good = pickle_writer.stream(pickle_writer.encode_array(stored))
    data = good[:at] + change + good[at + len(change) :]
    assert read(data) == slowly(data)


def test_arrays_are_read_at_once() -> None:
    taken: list[object] = []
    load = pickle_reader._Reader._load_array
    stored = StoredArray("7", "float32", 300, (2, 70_000), (70_000, 1), 200_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle_reader._Reader, "_load_array", lambda self, m: (taken.append(m), load(self, m))[1])
        value = {"a": [ArrayLeaf("a")], "b": ArrayLeaf("b", parameter=True)}
        data = pickle_writer.dumps(value, lambda leaf: stored)
        assert pickle_reader.loads(data, lambda found: found) == {"a": [stored], "b": stored}
    assert len(taken) == 2


def test_a_survey_is_complete_where_nothing_was_left_unbuilt() -> None:
    plain = pickle_writer.dumps({"a": [1, {2, 3}], "b": complex(1, 2)})
    assert pickle_reader.survey(plain, lambda stored: stored) == ({"a": [1, {2, 3}], "b": 1 + 2j}, True)
    other = pickle_writer.dumps({"a": FormatError("x")})
    value, complete = pickle_reader.survey(other, lambda stored: stored, trust=["datastates.errors.FormatError"])
    assert isinstance(value["a"], Unbuilt)
    assert not complete
