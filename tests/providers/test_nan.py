"""A NaN among the values or the keys of containers is restored, and is no difference from another NaN."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates.errors import RestoreError
from datastates.providers import from_state_dict

NAN = float("inf") - float("inf")


@pytest.mark.parametrize(
    "value",
    [
        math.nan, complex(1, math.nan), Decimal("nan"), Decimal("snan"), np.float32("nan"), np.complex64(math.nan),
        (1, (math.nan, 2)), {"a": {1, 2}, "b": frozenset([math.nan])}, {math.nan: 3, 2: 4}, {(1, math.nan): [math.nan]},
        np.array([1.0, math.nan, None], object), np.array([(1, math.nan)], [("a", "i4"), ("b", "f8")]),
    ],
    ids=repr,
)  # fmt: skip
def test_a_callable_with_a_nan(value: Any, tmp_path: Path) -> None:
    weight = torch.ones(3)

    def state() -> dict[str, Any]:
        return {"w": weight, "best": value}

    ds.snapshot([from_state_dict("s", state)], tmp_path / "c").wait_committed()
    weight.zero_()
    ds.restore([from_state_dict("s", state)], tmp_path / "c", trust="all")
    assert torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize(("saved", "live"), [(math.nan, 1.0), (1.0, math.nan), ((math.nan,), (1.0,)), (NAN, "nan")])
def test_a_nan_is_no_other_value(saved: Any, live: Any, tmp_path: Path) -> None:
    ds.snapshot([from_state_dict("s", lambda: {"x": saved})], tmp_path / "c").wait_committed()
    with pytest.raises(RestoreError, match="cannot be put back"):
        ds.restore([from_state_dict("s", lambda: {"x": live})], tmp_path / "c")


def test_any_nan_is_another(tmp_path: Path) -> None:
    weight = torch.ones(3)
    ds.snapshot([from_state_dict("s", lambda: {"w": weight, "x": math.nan})], tmp_path / "c").wait_committed()
    weight.zero_()
    ds.restore([from_state_dict("s", lambda: {"w": weight, "x": -NAN})], tmp_path / "c")
    assert torch.equal(weight, torch.ones(3))


def test_live_containers_with_a_nan_as_key(tmp_path: Path) -> None:
    live: dict[Any, Any] = {math.nan: torch.ones(2), "n": {math.nan: 1, 2.0: 3}}
    ds.snapshot([from_state_dict("s", live)], tmp_path / "c").wait_committed()
    other: dict[Any, Any] = {NAN: torch.zeros(2), "n": {NAN: 0, 2.0: 0}}
    ds.restore([from_state_dict("s", other)], tmp_path / "c")
    assert list(map(len, (other, other["n"]))) == [2, 2]
    (first, inner) = other.values()
    assert first.tolist() == [1, 1]
    assert list(inner.values()) == [1, 3]
