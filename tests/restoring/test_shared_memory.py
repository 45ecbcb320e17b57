"""Live memory that several arrays of a state share: restored where it fits what was saved, else refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates.errors import RestoreError
from datastates.providers import from_state_dict


def saved(state: Any, path: Path) -> Path:
    ds.snapshot([from_state_dict("s", state)], path).wait_committed()
    return path


def test_live_memory_that_is_shared_but_was_not_is_refused(tmp_path: Path) -> None:
    path = saved({str(i): torch.full((1000,), float(i)) for i in range(4)}, tmp_path / "c")
    one = torch.zeros(1000)
    with pytest.raises(RestoreError, match="shares live memory"):
        ds.restore([from_state_dict("s", {str(i): one for i in range(4)})], path)
    assert one.sum() == 0


def test_live_memory_that_is_shared_as_it_was_is_restored(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    path = saved({"base": base, "tail": base[4:], "again": base}, tmp_path / "c")
    live = torch.zeros(10)
    ds.restore([from_state_dict("s", {"base": live, "tail": live[4:], "again": live})], path)
    assert torch.equal(live, base)


VIEWS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "tails": lambda a: {"a": a, "tail": a[3:], "rest": a[7:], "middle": a[5:9]},
    "another type": lambda a: {"a": a, "bytes": a.view(np.uint8)[8:]},
    "a matrix": lambda a: {"a": a[1:], "matrix": a.reshape(4, 3).T, "column": a.reshape(4, 3)[:, 1]},
    "of torch, too": lambda a: {
        "a": a,
        "tensor": torch.from_numpy(a)[2:],
        "type": torch.from_numpy(a).view(torch.int32),
    },
}


@pytest.mark.parametrize("views", VIEWS)
def test_views_of_numpy_are_restored_into_such_views(views: str, tmp_path: Path) -> None:
    array, live = np.arange(12.0), np.zeros(12)
    path = saved(VIEWS[views](array), tmp_path / "c")
    ds.restore([from_state_dict("s", VIEWS[views](live))], path)
    assert (live == array).all()


def test_large_views_of_numpy_are_restored_into_such_views(tmp_path: Path) -> None:
    array, live = np.arange(1 << 20), np.zeros(1 << 20, np.int64)
    path = saved({"a": array, "tail": array[1000:]}, tmp_path / "c")
    ds.restore([from_state_dict("s", {"a": live, "tail": live[1000:]})], path)
    assert (live == array).all()


def test_views_of_numpy_are_refused_where_they_hold_other_bytes(tmp_path: Path) -> None:
    array, live = np.arange(12.0), np.zeros(13)
    path = saved(VIEWS["tails"](array), tmp_path / "c")
    with pytest.raises(RestoreError, match="shares live memory"):
        ds.restore([from_state_dict("s", {**VIEWS["tails"](live[:12]), "tail": live[4:]})], path)
    assert not live.any()
