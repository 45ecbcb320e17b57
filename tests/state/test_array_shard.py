"""``array_shard`` describes parts, and a shard that does not describe its array is refused before memory is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.errors import ProviderError


class One(ds.StateProvider):
    """One shard of the caller's, in the memory of an array."""

    def __init__(self, array: np.ndarray, **fields: Any) -> None:
        super().__init__("m")
        buffer = ds.Buffer(array.ctypes.data, array.nbytes, owner=array)
        known = {"key": "w", "dtype": "float32", "kind": "numpy", "stride": (1,), "global_shape": (64,)}
        self.shard = ds.Shard(**{**known, "buffer": buffer, "source": array, **fields})

    def shards(self) -> list[ds.Shard]:
        return [self.shard]


def test_parts() -> None:
    rows = np.zeros((2, 3), np.float32)
    box = ds.array_shard("w", rows, global_shape=(8, 3), offset=(4, 0), replicas=(3, 1))
    assert (box.global_shape, box.shape, box.offset, box.flat) == ((8, 3), (2, 3), (4, 0), None)
    assert box.replicas == (1, 3)
    flat = ds.array_shard("w", rows.reshape(-1), global_shape=(8, 3), flat=(5, 11))
    assert (flat.global_shape, flat.shape, flat.offset, flat.flat) == ((8, 3), (6,), None, (5, 11))


@pytest.mark.parametrize(
    "part",
    [
        {"global_shape": (8, 3), "offset": (7, 0)},
        {"global_shape": (8, 3), "offset": (-1, 0)},
        {"global_shape": (8, 3), "offset": (0,)},
        {"global_shape": (8, 3), "offset": (0, 0), "flat": (0, 6)},
        {"global_shape": (8, 3), "flat": (0, 6)},
        {"global_shape": (8, 3), "flat": (0, 6, 6)},
        {"global_shape": (8, 3), "offset": (0.5, 0)},
        {"global_shape": (8.5, 3), "offset": (0, 0)},
        {"global_shape": (8, 3)},
        {"offset": (0, 0)},
    ],
)
def test_what_is_no_part_is_refused_by_key(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'w'"):
        ds.array_shard("w", np.zeros((2, 3), np.float32), **part)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": (10,), "offset": (0,)},
        {"shape": (10,), "offset": None, "flat": (0, 10)},
        {"shape": (5,), "offset": None, "flat": (0, 10)},
        {"shape": (5,), "offset": (62,)},
        {"shape": (5,), "offset": (0,), "dtype": "float64"},
    ],
)
def test_a_shard_that_is_not_its_array_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    saved = np.arange(64, dtype=fields.get("dtype", "float32"))
    whole = One(saved, shape=(64,), offset=(0,), dtype=str(saved.dtype))
    ds.snapshot([whole], tmp_path / "c").wait_committed()
    around = np.full(32, -1, np.float32)
    with pytest.raises(ProviderError, match="'m/w'"):
        ds.restore([One(around[8:13], **fields)], tmp_path / "c")
    assert (around == -1).all()


def test_a_buffer_that_is_larger_than_its_array_is_not_taken_for_it(tmp_path: Path) -> None:
    saved = np.arange(64, dtype=np.float32)
    ds.snapshot([One(saved, shape=(64,), offset=(0,))], tmp_path / "c").wait_committed()
    around = np.full(128, -1, np.float32)
    live = around[32:96]
    buffer = ds.Buffer(around.ctypes.data, around.nbytes, owner=live)
    ds.restore([One(live, shape=(64,), offset=(0,), buffer=buffer, buffer_offset=128)], tmp_path / "c")
    assert (live == saved).all()
    assert (around[:32] == -1).all()
    assert (around[96:] == -1).all()


def test_a_save_refuses_what_is_no_part(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="'m/w'"):
        ds.snapshot([One(np.zeros(5, np.float32), shape=(5,), offset=(62,))], tmp_path / "c")
