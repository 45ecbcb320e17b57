"""Attributes of an OrderedDict; a module's ``state_dict()`` keeps the versions of its parts in one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates as ds
from datastates.providers import from_state_dict, from_stateful

VERSIONS = {"": {"version": 1}, "1": {"version": 2}}


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def state(**attributes: Any) -> Any:
    made = OrderedDict(weight=torch.arange(6.0), bias=torch.zeros(2))
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize("opaque", [False, True])
def test_they_are_kept(tmp_path: Path, opaque: bool) -> None:
    """Also beside a set, with which the value is taken apart on a slower path."""
    rest = {"rest": {1, 2}} if opaque else {}
    value = {"module": state(_metadata=OrderedDict(VERSIONS), note="text"), **rest}
    ds.snapshot([from_state_dict("s", value)], tmp_path / "c").wait_committed()
    file = tmp_path / "c" / "rank-00000.pt"
    for found in (ds.load(tmp_path / "c"), torch.load(file, weights_only=not opaque)):
        assert vars(found["s"]["module"]) == {"_metadata": OrderedDict(VERSIONS), "note": "text"}
        assert torch.equal(found["s"]["module"]["weight"], torch.arange(6.0))


def test_arrays_among_them_are_kept(tmp_path: Path) -> None:
    value = {"module": state(mean=torch.full((5,), 3.0), objects=[{1}])}
    ds.snapshot([from_state_dict("s", value)], tmp_path / "c").wait_committed()
    found = ds.load(tmp_path / "c", trust="all")["s"]["module"]
    assert torch.equal(found.mean, torch.full((5,), 3.0))
    assert found.objects == [{1}]
    live = {"module": state(mean=torch.zeros(5), objects=[set()])}
    live["module"]["weight"].zero_()
    ds.restore([from_state_dict("s", live)], tmp_path / "c", trust="all")
    assert torch.equal(live["module"]["weight"], torch.arange(6.0))


def test_they_are_those_of_the_call(tmp_path: Path) -> None:
    value = {"module": state(_metadata=copy.deepcopy(VERSIONS))}
    with ds.Checkpointer(tmp_path) as ckpt:
        provider = from_state_dict("s", value)
        for step in range(4):
            value["module"]._metadata["1"]["version"] = step
            ckpt.snapshot([provider], step=step)
            value["module"]._metadata["1"]["version"] = -1
        ckpt.wait()
        del value["module"]._metadata
        ckpt.snapshot([provider], step=4)
    for step in range(4):
        assert ds.load(tmp_path / f"step-{step:08d}")["s"]["module"]._metadata["1"]["version"] == step
    assert not vars(ds.load(tmp_path / "step-00000004")["s"]["module"])


def test_modules_hand_them_to_load_state_dict(tmp_path: Path) -> None:
    saved, live = module(), module()
    seen: list[object] = []
    ds.snapshot([from_stateful("m", saved)], tmp_path / "c").wait_committed()
    found = torch.load(tmp_path / "c" / "rank-00000.pt")["m"]
    assert found._metadata == saved.state_dict()._metadata
    # with a hook, restoring calls load_state_dict()
    live[1].register_load_state_dict_pre_hook(lambda _, __, ___, local_metadata, *rest: seen.append(local_metadata))
    ds.restore([from_stateful("m", live)], tmp_path / "c")
    assert torch.equal(live[0].weight, saved[0].weight)
    assert {"version": 2} in [{"version": item["version"]} for item in seen if isinstance(item, dict)]
