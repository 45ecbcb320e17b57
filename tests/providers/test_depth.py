"""Values nested as deeply as ``torch.save`` takes them come back; deeper ones are refused by key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates as ds
from datastates.errors import ProviderError
from datastates.providers import from_state_dict

WAYS: dict[str, Callable[[Any], Any]] = {
    "lists": lambda inner: [inner],
    "dicts": lambda inner: {"a": inner},
    "tuples": lambda inner: (inner, 1),
    "several": lambda inner: [{"k": (inner, [])}, 2],
}


def nested(way: str, levels: int, rest: Any, fill: float) -> Any:
    value: Any = [torch.full((3,), fill), rest]
    for _ in range(levels):
        value = WAYS[way](value)
    return {"top": value}


def depth(value: Any) -> int:
    levels = 0
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
        levels += 1
    return levels


@pytest.mark.parametrize("rest", [None, {1}], ids=["plain", "other"])
@pytest.mark.parametrize("way", WAYS)
def test_a_deep_value_comes_back(tmp_path: Path, way: str, rest: Any) -> None:
    levels = 160 if way == "several" else 490
    value = nested(way, levels, rest, 1.0)
    limit = sys.getrecursionlimit()
    live = nested(way, levels, rest, 0.0)
    with ds.Checkpointer(tmp_path / "c") as ckpt:
        for step in (1, 2):
            ckpt.snapshot([from_state_dict("s", value)], step=step)
        ckpt.wait()
        ckpt.restore([from_state_dict("s", live)])
    assert sys.getrecursionlimit() == limit
    file = next((tmp_path / "c").rglob("*.pt"))
    for found in (live, ds.load(file)["s"], torch.load(file, weights_only=False)["s"]):
        assert depth(found) == depth(value)
        while isinstance(found, (dict, list, tuple)):
            found = next(iter(found.values() if isinstance(found, dict) else found))
        assert torch.equal(found, torch.ones(3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("levels", [1001, 30_000])
def test_a_deeper_one_is_refused_by_key(tmp_path: Path, way: str, levels: int) -> None:
    with pytest.raises(ProviderError, match=r"'top/.*1000 levels deep"):
        ds.snapshot([from_state_dict("s", nested(way, levels, None, 1.0))], tmp_path / "c")


@pytest.mark.parametrize("value", [torch.arange(6.0), torch.eye(3).to_sparse()])
def test_the_default_device_makes_no_difference(tmp_path: Path, value: torch.Tensor) -> None:
    ds.snapshot([from_state_dict("s", {"w": value})], tmp_path / "c").wait_committed()
    live = {"w": value * 0}
    with torch.device("meta"):
        found = ds.load(tmp_path / "c")["s"]["w"]
        ds.restore([from_state_dict("s", live)], tmp_path / "c")
    for got in (found, live["w"]):
        assert got.device.type == "cpu"
        assert torch.equal(got.to_dense(), value.to_dense())


def test_a_module_is_for_the_other_provider() -> None:
    with pytest.raises(TypeError, match="from_stateful"):
        from_state_dict("m", torch.nn.Linear(1, 1))
