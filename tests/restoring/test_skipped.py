"""``strict=False`` warns of what it leaves out, and fails where nothing fits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates.errors import RestoreError
from datastates.providers import from_state_dict, from_stateful


def _save(directory: Path, providers: list[ds.StateProvider]) -> None:
    with ds.Checkpointer(directory) as ckpt:
        ckpt.snapshot(providers, step=3).wait_committed()


def _restore(directory: Path, providers: list[ds.StateProvider], *, strict: bool = False) -> ds.Restored:
    with ds.Checkpointer(directory) as ckpt:
        restored = ckpt.restore(providers, strict=strict)
    assert restored is not None
    return restored


def _model(outputs: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, outputs))


def test_what_is_left_out_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"w{i}" for i in range(12)]
    _save(tmp_path, [from_state_dict("s", {**{n: torch.ones(2) for n in names}, "old": torch.ones(2)})])
    live = {**{n: torch.zeros(2 if n == "w3" else 3) for n in names}, "new": torch.zeros(2)}
    with caplog.at_level(logging.WARNING, "datastates"):
        restored = _restore(tmp_path, [from_state_dict("s", live)])
    assert restored.missing_keys == ["s/new"]
    assert restored.unexpected_keys == ["s/old"]
    assert len(restored.mismatched_keys) == 11
    (said,) = caplog.messages
    assert f"{tmp_path / 'step-00000003'} is restored in part: 1 missing, 1 unexpected and 11 mismatched keys" in said
    hint = "(restore(rename=...) finds arrays under other names)"
    assert f"the checkpoint lacks 's/new'; the live state lacks 's/old' {hint}; 's/w0': float32 of shape (2,)" in said
    assert said.endswith("; and 3 more")
    assert torch.equal(live["w3"], torch.ones(2))


def test_a_whole_restore_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.ones(2)}
    _save(tmp_path, [from_state_dict("s", state)])
    _restore(tmp_path, [from_state_dict("s", state)])
    assert caplog.messages == []


@pytest.mark.parametrize(
    "provider",
    [
        from_stateful("net", _model(2)),
        from_stateful("model", _model(2).half()),
        from_state_dict("model", {"other": torch.zeros(2)}),
    ],
    ids=["name", "half", "keys"],
)
def test_where_nothing_fits_it_is_an_error(provider: ds.StateProvider, tmp_path: Path) -> None:
    _save(tmp_path, [from_stateful("model", _model(2))])
    with pytest.raises(RestoreError, match="does not fit the live state") as caught:
        _restore(tmp_path, [provider])
    assert caught.value.missing or caught.value.mismatched
    other = {"w": torch.zeros(1)}
    _save(tmp_path / "with", [from_stateful("model", _model(2)), from_state_dict("s", {"w": torch.ones(1)})])
    restored = _restore(tmp_path / "with", [provider, from_state_dict("s", other)])
    assert restored.missing_keys or restored.mismatched_keys
    assert other["w"] == 1


def _optimizer(kind: str, model: torch.nn.Module, steps: int) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if kind == "SGD" else {"amsgrad": True} if kind == "AdamW" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        made.step()
    return made


KINDS = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_parameters_of_another_shape_do_not_fit(kind: str, steps: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = _optimizer(kind, _model(2), 5)
    _save(tmp_path, [from_stateful("optim", saved)])
    model = _model(7)  # another head
    live = _optimizer(kind, model, steps)
    before = {k: v.clone() for k, v in (live.state_dict()["state"].get(3) or {}).items()}
    if kind != "Adafactor":  # its states are sums of rows and columns
        with pytest.raises(RestoreError, match=r"'optim/state/2/\w+'") as caught:
            _restore(tmp_path, [from_stateful("optim", live)], strict=True)
        assert {text.split(":")[0].rpartition("/")[0] for text in caught.value.mismatched} == {
            "optim/state/2",
            "optim/state/3",
        }
        restored = _restore(tmp_path, [from_stateful("optim", live)])
        assert {key.rpartition("/")[0] for key in restored.mismatched_keys} == {"optim/state/2", "optim/state/3"}
        states = live.state_dict()["state"]
        assert all(torch.equal(v, states[0][k]) for k, v in saved.state_dict()["state"][0].items())
        assert all(torch.equal(v, states[3][k]) for k, v in before.items())
        model(torch.ones(1, 3)).sum().backward()
        live.step()
    same = _optimizer(kind, _model(2), steps)
    assert not _restore(tmp_path, [from_stateful("optim", same)], strict=True).mismatched_keys


def test_states_of_any_shape_are_other_makers_own_business(tmp_path: Path) -> None:
    class LowRank(torch.optim.Optimizer):
        def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
            super().__init__(parameters, {})

    parameter = torch.nn.Parameter(torch.ones(4, 4))
    saved = LowRank([parameter])
    saved.state[parameter]["exp_avg"] = torch.ones(4, 1)
    _save(tmp_path, [from_stateful("optim", saved)])
    fresh = LowRank([parameter])
    _restore(tmp_path, [from_stateful("optim", fresh)], strict=True)
    assert torch.equal(fresh.state[parameter]["exp_avg"], torch.ones(4, 1))


@pytest.mark.parametrize(
    ("live", "hinted"),
    [(torch.zeros(2).half(), True), (torch.zeros(3).half(), False), (torch.zeros(2, dtype=torch.int32), False)],
)
def test_an_error_tells_of_cast_where_it_would_help(live: torch.Tensor, *, hinted: bool, tmp_path: Path) -> None:
    _save(tmp_path, [from_state_dict("s", {"w": torch.ones(2)})])
    with pytest.raises(RestoreError, match="'s/w': float32 of shape") as failure:
        _restore(tmp_path, [from_state_dict("s", {"w": live})], strict=True)
    assert ("restore(cast=True) converts it" in str(failure.value)) is hinted


def _read_only(dtype: str) -> np.ndarray[Any, Any]:
    array = np.zeros(2, dtype)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(
    ("live", "hindrance"),
    [
        (_read_only("<f4"), "the live array is read-only"),
        (_read_only("<f8"), "float64 of shape \\(2,\\) in the live state, and the live array is read-only"),
        (torch.zeros(1).expand(2), "elements of the live array share memory"),
        (torch.zeros(1).double().expand(2), "in the live state, and elements of the live array share memory"),
        (np.zeros(2, ">f4"), "ndarray of type >f4, in the other byte order .*newbyteorder"),
    ],
)
def test_an_error_names_what_no_cast_helps(live: object, hindrance: str, *, cast: bool, tmp_path: Path) -> None:
    _save(tmp_path, [from_state_dict("s", {"w": torch.ones(2)})])
    with pytest.raises(RestoreError, match=hindrance) as failure:
        ds.restore([from_state_dict("s", {"w": live})], tmp_path, cast=cast)
    assert "cast=True" not in str(failure.value)


def test_an_error_tells_of_rename_where_keys_differ(tmp_path: Path) -> None:
    _save(tmp_path, [from_state_dict("s", {"module.w": torch.ones(2)})])
    with pytest.raises(RestoreError, match=r"lacks 's/w'; .* lacks 's/module.w' \(restore\(rename=\.\.\.\)"):
        _restore(tmp_path, [from_state_dict("s", {"w": torch.zeros(2)})], strict=True)
    with pytest.raises(RestoreError) as failure:
        _restore(tmp_path, [from_state_dict("s", {"module.w": torch.zeros(2), "w": torch.zeros(2)})], strict=True)
    assert "rename=" not in str(failure.value)
