"""Arrays of NumPy that are no plain memory come back as ``pickle`` gives them back, without trust."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.providers import PickledObjectProvider, from_state_dict

FIELDS = [("a", "i4"), ("b", "f8")]
ROWS = [(1, 2.0), (3, 4.0)]


def _strings(values: list[Any], **options: Any) -> np.ndarray[Any, Any]:
    return np.array(values, np.dtypes.StringDType(**options))


KINDS: dict[str, Callable[[], Any]] = {
    "strings": lambda: _strings(["a", "", "a string that is longer than sixteen bytes"]),
    "no strings": lambda: _strings([]),
    "strings, None among them": lambda: _strings(["a", None], na_object=None),
    "strings, NaN among them": lambda: _strings(["a", float("nan")], na_object=float("nan"), coerce=False),
    "a type of strings": lambda: np.dtypes.StringDType(na_object="gone"),
    "masked": lambda: np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
    "masked, columns first": lambda: np.ma.array(np.arange(6.0).reshape(2, 3), mask=np.eye(2, 3)).T,
    "masked, with a value to fill in": lambda: np.ma.array([[1, 2], [3, 4]], mask=[[0, 1], [0, 0]], fill_value=9),
    "masked objects": lambda: np.ma.array([1, "x"], mask=[0, 1], dtype=object, fill_value="-"),
    "masked rows": lambda: np.ma.array(ROWS, dtype=FIELDS, mask=[(0, 1), (0, 0)]),
    "a masked row": lambda: np.ma.array(ROWS, dtype=FIELDS, mask=[(0, 1), (0, 0)])[0],
    "records": lambda: np.rec.array(ROWS, dtype=FIELDS),
    "a record": lambda: np.rec.array(ROWS, dtype=FIELDS)[1],
    "a type of records": lambda: np.rec.array(ROWS, dtype=FIELDS).dtype,
    "records in rows": lambda: np.zeros(2, [("r", np.dtype((np.record, FIELDS))), ("x", "f4", (2,))]),
    "rows with titles": lambda: np.array(ROWS, [(("title", "a"), "i4"), ("b", "f8")]),
    "a row with an object": lambda: np.array([(1, "x")], [("a", "i4"), ("b", "O")])[0],
    "objects with metadata": lambda: np.array(["a"], np.dtype("O", metadata={"vlen": str})),
    "dates with metadata": lambda: np.array(["2020-01-01"], np.dtype("M8[D]", metadata={"zone": 1})),
}


def _parts(value: Any) -> list[Any]:
    """The parts of an array that can be compared."""
    dtype = value if isinstance(value, np.dtype) else value.dtype
    parts = [type(value), dtype, dtype.metadata, dtype.type]
    if isinstance(value, np.ma.MaskedArray):
        parts += [repr(value.fill_value), *_parts(np.array(value.mask))]
    if isinstance(value, (np.ndarray, np.generic)):
        parts += [np.asarray(value).flags.f_contiguous, repr(np.asarray(value).tolist())]
    return parts


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_given_back_as_by_pickle(tmp_path: Path, kind: str) -> None:
    value = KINDS[kind]()
    expected = _parts(pickle.loads(pickle.dumps(value)))
    taken: list[Any] = []
    pickled = PickledObjectProvider("object", lambda: {"x": value}, taken.append)
    ds.snapshot([from_state_dict("tree", {"x": value}), pickled], tmp_path / "c").wait_committed()
    live = {"x": None}
    ds.restore([from_state_dict("tree", live), pickled], tmp_path / "c")
    for found in (live, taken[0], *ds.load(tmp_path / "c").values()):
        assert _parts(found["x"]) == expected


def test_the_one_masked_value_stays_one(tmp_path: Path) -> None:
    ds.snapshot([from_state_dict("tree", {"x": np.ma.masked})], tmp_path / "c").wait_committed()
    assert ds.load(tmp_path / "c")["tree"]["x"] is np.ma.masked
