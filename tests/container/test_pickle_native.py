"""The native pass reads the same as the reader that goes opcode by opcode, or leaves the object to it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.container import pickle_reader, pickle_writer
from datastates.container.index import Index
from datastates.container.pickle_native import read_plain
from datastates.container.records import Records
from datastates.container.rows import StoredRows, logical, reference
from datastates.container.table import table_of
from datastates.errors import FormatError
from datastates.state import dtypes
from datastates.state.shards import ArrayLeaf, Shard, StoredArray

NUMBERS = st.integers(0, 2**61) | st.sampled_from([0, 1, 255, 256, 2**31 - 1, 2**31])
ARRAYS = st.builds(
    lambda dtype, offset, dims, elements: StoredArray(
        "0", dtype, offset, tuple(d for d, _ in dims), tuple(s for _, s in dims), elements
    ),
    dtype=st.sampled_from(sorted(dtypes.BY_NAME)),
    offset=NUMBERS.map(lambda n: n // 16),
    dims=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4),
    elements=NUMBERS.map(lambda n: n // 16),
)
KEYS = st.text(max_size=5) | st.integers(-(2**40), 2**40) | st.just("\ud800")
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.tuples(ARRAYS, st.booleans(), st.booleans())
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | inner.map(lambda v: [v, v] if isinstance(v, (list, dict)) else v)
    ),
    max_leaves=12,
)


def written(value: Any) -> tuple[bytes, StoredRows]:
    """The opcodes of a value, and the rows of its arrays in the order of the walk."""
    stored: dict[str, StoredArray] = {}
    copies: dict[int, object] = {}

    def put(item: Any) -> Any:
        if id(item) in copies:
            return copies[id(item)]
        if type(item) is tuple and item and isinstance(item[0], StoredArray):
            key = f"array {len(stored)}"
            stored[key] = replace(item[0], record=str(len(stored)))
            return ArrayLeaf(key, item[1], item[2])
        if isinstance(item, dict):
            copies[id(item)] = made = type(item)()
            made.update((k, put(v)) for k, v in item.items())
            if isinstance(item, OrderedDict):
                vars(made).update((k, put(v)) for k, v in vars(item).items())
            return made
        if isinstance(item, list):
            copies[id(item)] = made = []
            made.extend(map(put, item))
            return made
        return tuple(map(put, item)) if type(item) is tuple else item

    opcodes = pickle_writer.body(
        pickle_writer.dumps(put(value), lambda leaf: replace(stored[leaf.key], requires_grad=leaf.requires_grad))
    )
    return opcodes, rows_of(stored)


def rows_of(stored: dict[str, StoredArray]) -> StoredRows:
    sizes = {name: dtypes.BY_NAME[name].itemsize for name in dtypes.BY_NAME}
    shards = [
        Shard(
            k,
            s.dtype,
            "torch",
            s.shape,
            s.stride,
            tuple(n + i % 2 for n in s.shape),  # every other array is a part of a larger tensor
            (0,) * len(s.shape),
            buffer_offset=s.offset * sizes[s.dtype],
        )
        for i, (k, s) in enumerate(stored.items())
    ]
    count = len(shards)
    nbytes = np.array([s.elements * sizes[s.dtype] for s in stored.values()], np.uint64)
    zeros = np.zeros(count, np.uint64)
    table = table_of(["m"], [(0, s) for s in shards], list(range(count)))
    no_crc = np.zeros(0, np.uint32)
    return StoredRows(Index({}, Records(zeros, zeros, nbytes, no_crc), no_crc, table, (), 0, 0, 0), "m")


def slowly(opcodes: bytes, rows: StoredRows, *, whole: bool) -> str | None:
    """The repr of the value read opcode by opcode, with whole tensors or with rows; None where that refuses it."""
    describe = logical if whole else reference

    def resolve(stored: StoredArray) -> object:
        place = (stored.record, stored.offset, stored.dtype, stored.shape, stored.stride)
        if place not in rows.by_place:
            raise FormatError("not in the index")
        key = rows.by_place[place]
        return describe(rows[key], key=key, requires_grad=stored.requires_grad)

    try:
        return repr(pickle_reader.survey(pickle_writer.stream(opcodes), resolve)[0])
    except FormatError:
        return None


@given(VALUES, st.booleans())
def test_plain_values_are_read_at_once(value: Any, whole: bool) -> None:
    opcodes, rows = written(value)
    found = read_plain(opcodes, rows, logical=whole)
    assert found is not None
    assert repr(found[0]) == slowly(opcodes, rows, whole=whole)


@settings(max_examples=500)
@given(VALUES, st.data())
def test_what_is_damaged_is_read_the_same_or_left(value: Any, data: st.DataObject) -> None:
    good, rows = written(value)
    at = data.draw(st.integers(0, len(good)))
    length = data.draw(st.integers(0, 3))
    opcodes = st.sampled_from([*b"().]}KMJGXNqrhjcRtesua\x85\x86\x87\x88\x89\x8a0b", 0, 1, 255])
    change = bytes(data.draw(st.lists(opcodes, max_size=3)))
    damaged = good[:at] + change + good[at + length :]
    found = read_plain(damaged, rows, logical=False)
    assert found is None or repr(found[0]) == slowly(damaged, rows, whole=False)


@pytest.mark.parametrize(
    "value",
    [{1, 2}, {(1, 2): 3}, {None: 1}, {1.5: 1}, Counter("a"), np.float64(1), b"bytes", 2**70, complex(1, 2), range(3)],
    ids=repr,
)
def test_anything_else_is_left(value: object) -> None:
    opcodes, rows = written({"a": [value]})
    assert read_plain(opcodes, rows, logical=False) is None
    assert slowly(opcodes, rows, whole=False) is not None


@pytest.mark.parametrize(
    "opcodes",
    [
        b"K", b"(", b"e", b"a", b"u", b"(u", b"](e(", b"}(K\x01u", b"]K\x01Na", b"K\x01t", b"K\x01q\x01", b"h\x00",
        b"\x85", b"X\xff\xff\xff\xffa", b"X\x01\x00\x00\x00\xff", b"r\xff\xff\xff\x7f", b"NN", b"", b"N.",
        b"]q\x00}(h\x00Nu", b"cposix\nsystem\n)R", b"](K\x01(K\x02ee", b"ccollections\nOrderedDict\nK\x01\x85R",
    ],
)  # fmt: skip
def test_broken_opcodes_are_left(opcodes: bytes) -> None:
    assert read_plain(opcodes, rows_of({}), logical=False) is None


@pytest.mark.parametrize("unit", [b"]", b"}", b")\x85"])
def test_more_containers_than_a_pickler_writes_are_left(unit: bytes) -> None:
    """They would take a hundred bytes of memory for each byte of the file."""
    few, many = (b"](" + unit * count + b"e" for count in (1000, 100_000))
    assert read_plain(few, rows_of({}), logical=False) is not None
    assert read_plain(many, rows_of({}), logical=False) is None


def test_attributes_of_an_ordered_mapping_are_read_at_once() -> None:
    array = StoredArray("0", "float32", 0, (2,), (1,), 2)
    value = OrderedDict(a=(array, False, False))
    value._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    value.array = (array, False, False)  # type: ignore[attr-defined]
    value.again = value._metadata  # type: ignore[attr-defined]
    opcodes, rows = written({"module": value})
    found: Any = read_plain(opcodes, rows, logical=False)
    assert found is not None
    module = found[0]["module"]
    assert list(vars(module)) == ["_metadata", "array", "again"]
    assert module._metadata == OrderedDict({"": {"version": 1}})
    assert module.again is module._metadata
    assert module.array.key == "array 1"


@pytest.mark.parametrize("opcodes", [b"}}b", b"]}b", b"b", b"}b", b"ccollections\nOrderedDict\n)R]b", b"NNb"])
def test_attributes_of_anything_else_are_left(opcodes: bytes) -> None:
    assert read_plain(opcodes, rows_of({}), logical=False) is None


def test_arrays_in_another_order_are_left() -> None:
    array = StoredArray("0", "float32", 0, (2,), (1,), 2)
    opcodes, rows = written({"a": (array, False, False), "b": (array, False, False)})
    assert read_plain(opcodes, rows, logical=False) is not None
    swapped = opcodes.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x002")
    swapped = swapped.replace(b"X\x01\x00\x00\x001", b"X\x01\x00\x00\x000").replace(b"\x00\x00\x002", b"\x00\x00\x001")
    assert swapped != opcodes
    assert read_plain(swapped, rows, logical=False) is None
    assert slowly(swapped, rows, whole=False) is not None


def test_arrays_of_one_place_go_by_one_key() -> None:
    tied = table_of(["m"], [(0, s) for s in (shard("a"), shard("b"), shard("c", 4))], [0, 0, 0])
    records = Records(*[np.zeros(1, np.uint64)] * 3, np.zeros(1, np.uint32))
    rows = StoredRows(Index({}, records, np.zeros(0, np.uint32), tied, (), 0, 0, 0), "m")
    assert rows.names == ["b", "b", "c"]
    assert list(rows.names_of(["c", "a"])) == ["c", "b"]


def shard(key: str, offset: int = 0) -> Shard:
    return Shard(key, "float32", "torch", (2,), (1,), (2,), (0,), buffer_offset=offset)
