"""Live memory that several arrays of a state share: restored where it fits what was saved, else refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import datastates as ds
from datastates.errors import ProviderError, RestoreError
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


OVERLAPPING: dict[str, Callable[[], Any]] = {
    "numpy, one element": lambda: as_strided(np.zeros(1), (4, 3), (0, 0)),
    "numpy, windows": lambda: sliding_window_view(np.zeros(6), 3, writeable=True),
    "torch, expanded": lambda: torch.zeros(3, dtype=torch.float64).expand(4, 3),
    "torch, windows": lambda: torch.zeros(6, dtype=torch.float64).unfold(0, 3, 1),
    "torch, rows that interlock": lambda: torch.zeros(17, dtype=torch.float64).as_strided((4, 3), (4, 2)),
}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("which", OVERLAPPING)
def test_an_array_whose_elements_share_memory_is_refused(which: str, cast: bool, tmp_path: Path) -> None:
    dtype = torch.float32 if cast else torch.float64
    path = saved({"a": torch.arange(12, dtype=dtype).reshape(4, 3), "b": torch.ones(3)}, tmp_path / "c")
    live, other = OVERLAPPING[which](), torch.zeros(3)
    with pytest.raises(RestoreError, match="'s/a'.*share memory" if not cast else "'s/a'"):
        ds.restore([from_state_dict("s", {"a": live, "b": other})], path, cast=cast)
    assert (live == 0).all()
    assert other.sum() == 0


@pytest.mark.parametrize("which", OVERLAPPING)
def test_such_an_array_is_restored_into_one_like_it(which: str, tmp_path: Path) -> None:
    array, live = OVERLAPPING[which](), OVERLAPPING[which]()
    array[-1, -1] = 7.0
    path = saved({"a": array}, tmp_path / "c")
    ds.restore([from_state_dict("s", {"a": live})], path)
    assert (live == array).all()
    assert (live != 0).any()


def test_rows_that_interlock_without_sharing_memory_are_restored(tmp_path: Path) -> None:
    path = saved({"a": torch.arange(6.0).reshape(3, 2)}, tmp_path / "c")
    live = torch.zeros(8).as_strided((3, 2), (2, 3))
    ds.restore([from_state_dict("s", {"a": live})], path)
    assert torch.equal(live, torch.arange(6.0).reshape(3, 2))


def test_memory_that_was_freed_is_named(tmp_path: Path) -> None:
    path = saved({"a": torch.ones(1000), "b": torch.ones(3)}, tmp_path / "c")
    live, other = torch.zeros(1000), torch.zeros(3)
    live.untyped_storage().resize_(0)
    with pytest.raises(ProviderError, match=r"'s/a'.* has no memory: its storage was freed"):
        ds.restore([from_state_dict("s", {"a": live, "b": other})], path)
    assert other.sum() == 0
    with pytest.raises(ProviderError, match="'s/a' has no memory: its storage was freed"):
        ds.snapshot([from_state_dict("s", {"a": live})], tmp_path / "d")
