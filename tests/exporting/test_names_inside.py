"""Tensors inside tensors that consist of others have names that people can read, and that stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from composed import Pair
from safetensors.torch import load_file

import datastates as ds
from datastates.exporting.export import choose, names_of
from datastates.providers import from_state_dict, from_stateful
from datastates.state.keys import shown


def _model() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    for layer in model:
        layer.weight = torch.nn.Parameter(Pair(layer.weight.detach(), torch.ones(2), 1), requires_grad=False)
    return model


@pytest.mark.parametrize("target", ["weights.safetensors", "weights.pt"])
def test_an_export_names_the_parts_by_the_weight(tmp_path: Path, target: str) -> None:
    model = _model()
    ds.snapshot([from_stateful("m", model)], tmp_path / "c").wait_committed()
    ds.export(tmp_path / "c", tmp_path / target)
    weights = load_file(tmp_path / target) if target.endswith("s") else torch.load(tmp_path / target)
    assert sorted(weights) == sorted(
        [f"{layer}.{name}" for layer in "01" for name in ("weight.first", "weight.second", "bias")]
    )
    for layer, part in enumerate(model):
        assert torch.equal(weights[f"{layer}.weight.first"], part.weight.first)
        assert torch.equal(weights[f"{layer}.weight.second"], part.weight.second)


def test_keys_of_parts_do_not_depend_on_what_stands_before_them(tmp_path: Path) -> None:
    value = Pair(torch.ones(2), Pair(torch.ones(2), torch.zeros(2), 2), 1)
    sparse = torch.eye(2).to_sparse()
    states = {
        "alone": {"w": value, "s": sparse},
        "more": {"a": [torch.ones(1)] * 3, "o": {1, 2}, "w": value, "s": sparse},
    }
    found = {}
    for name, state in states.items():
        ds.snapshot([from_state_dict("m", state)], tmp_path / name).wait_committed()
        with ds.open(tmp_path / name) as opened:
            found[name] = {key for key in opened if "~5" in key}
        assert _parts(ds.load(tmp_path / name, trust="all")["m"]["w"]) == _parts(value)
    assert found["alone"] == found["more"]
    assert {"m/~5:w/first", "m/~5:w/second/first", "m/~5:w/second/second"} < found["alone"]


def _parts(value: Any) -> Any:
    return (_parts(value.first), _parts(value.second), value.number) if type(value) is Pair else value.tolist()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("m/~5:0.weight/qdata", "m/0.weight.qdata"),
        ("m/~57:0.weight/1/3/qdata", "m/0.weight.qdata"),  # of an earlier version
        ("o/~5:state~10~1exp_avg/codes", "o/state/0/exp_avg.codes"),
        ("m/~5@3@0-2of4:w/codes", "m/w.codes.rank3"),
        ("m/~5@3@0-2of4:w/1/3/codes", "m/w.codes.rank3"),
        ("m/~5:w/inner/qdata", "m/w.inner.qdata"),
        ("m/~5:w/1/1/0", "m/w.1.1.0"),
        ("m/~5:w", "m/w"),
        ("m/~5:~4/qdata", "m/qdata"),
        ("model/a/~5:0.weight/qdata", "model/a/0.weight.qdata"),
        ("~5:0.weight/qdata", "0.weight.qdata"),
        ("m/~53", "m/~53"),
        ("m/~53/0", "m/~53/0"),
        ("m/w/~05:x", "m/w/~05:x"),
        ("m/~5:~3x/y", "m/~5:~3x/y"),
    ],
)
def test_what_people_are_shown(key: str, name: str) -> None:
    assert shown(key) == name


def test_names_stay_apart() -> None:
    keys = ["m/~5:w/first", "m/~5:w/second", "m/w.first"]
    assert names_of(keys, {}) == {
        "m/~5:w/first": "~5:w/first",
        "m/~5:w/second": "w.second",
        "m/w.first": "w.first",
    }
    assert names_of(["~5:w/first"], {}) == {"~5:w/first": "w.first"}
    assert list(names_of(keys[1:2], {"w.second": "x"}).values()) == ["x"]


def test_globs_match_both_spellings() -> None:
    keys = ["m/~5:w/first", "m/b"]
    assert choose(keys, ["m/w.*"]) == choose(keys, ["m/~5:w/*"]) == keys[:1]
