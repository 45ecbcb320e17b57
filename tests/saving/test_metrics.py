"""A snapshot's metric: which numbers are taken, and what the manifest says of them."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.commit import manifest
from datastates.commit.tiers import tier_of
from datastates.providers import HostTensorProvider
from datastates.storage import Location

torch = pytest.importorskip("torch")

OPTIONS: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}


def providers() -> list[HostTensorProvider]:
    return [HostTensorProvider("model", {"a": np.ones(3)})]


def save(root: Path, step: int, metric: Any) -> Path:
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        taken = ckpt.snapshot(providers(), step=step, metric=metric)
    return Path(taken.path)


NUMBERS = {
    "an integer": (3, 3.0),
    "a float": (0.1, 0.1),
    "a negative zero": (-0.0, -0.0),
    "a fraction": (Fraction(1, 4), 0.25),
    "a decimal": (Decimal("0.1"), 0.1),
    "of NumPy": (np.float32(0.1), float(np.float32(0.1))),
    "an integer of NumPy": (np.int8(-3), -3.0),
    "an array of NumPy without dimensions": (np.array(1.5), 1.5),
    "of torch": (torch.tensor(0.1), float(torch.tensor(0.1))),
    "of torch, with a gradient": (torch.tensor([2.5], dtype=torch.bfloat16, requires_grad=True), 2.5),
}
NO_NUMBERS = {
    "a bool": True,
    "a bool of NumPy": np.True_,
    "a bool of torch": torch.tensor(data=True),
    "a text": "0.5",
    "a text of NumPy": np.str_("0.5"),
    "bytes": b"0.5",
    "a complex number": 1j,
    "a list": [0.5],
    "two of NumPy": np.ones(2),
    "two of torch": torch.ones(2),
    "without a value": torch.ones((), device="meta"),
    "too large": 10**400,
}


def test_what_is_a_number_is_stored(tmp_path: Path) -> None:
    for step, (metric, stored) in enumerate(NUMBERS.values()):
        assert str(manifest.open(Location(save(tmp_path, step, metric))).metric) == str(stored)
    assert [one.metric for one in tier_of(Location(tmp_path)).checkpoints()] == [value for _, value in NUMBERS.values()]


@pytest.mark.parametrize("metric", [None, float("nan"), float("-inf"), torch.tensor(torch.inf), np.float16(np.nan)])
def test_without_a_finite_one_the_manifest_is_as_it_was(metric: Any, tmp_path: Path) -> None:
    fields = json.loads((save(tmp_path, 1, metric) / manifest.FILE).read_bytes())
    assert list(fields) == [*("format", "step", "sequence", "attempt", "created", "world_size", "containers", "crc32")]
    assert [one.metric for one in tier_of(Location(tmp_path)).checkpoints()] == [None]


@pytest.mark.parametrize("metric", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_is_no_number_is_refused(metric: Any, tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        with pytest.raises(TypeError, match=r"^metric: must be a number, got .*\)$"):
            ckpt.snapshot(providers(), step=1, metric=metric)
        assert ckpt.steps() == []
        ckpt.snapshot(providers(), step=1, metric=0.5).wait_committed()
