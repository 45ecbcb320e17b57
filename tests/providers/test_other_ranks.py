"""Restoring arrays that other ranks saved: this rank's nested value lacks them, or they were saved key by key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_memory import Checkpoint, of_state_dict

import datastates as ds
from datastates.providers import FlatLayout, Partition, ShardedZeroProvider, from_state_dict, from_stateful
from datastates.state.keys import join, parts
from datastates.testing import equal

STATES = ("step", "exp_avg", "exp_avg_sq")


def _states(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, torch.Tensor]]:
    """The optimizer's states by parameter number and state name, in a fixed order."""
    return {n: {k: states[k] for k in STATES} for n, states in sorted(optimizer.state_dict()["state"].items())}


@given(st.lists(st.one_of(st.text(max_size=4), st.integers()), min_size=1))
def test_keys_are_taken_apart(path: list[str | int]) -> None:
    key = ""
    for part in path:
        key = join(key, part)
    assert parts(key) == path


@pytest.mark.parametrize("part", [1.5, (1, 2), None])
def test_keys_of_other_components_are_refused(part: object) -> None:
    with pytest.raises(ValueError, match="no path"):
        parts(join("a", part))


def _trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _zero(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ShardedZeroProvider:
    """The same state in one flat partition, the parameters numbered."""
    parameters = list(model.parameters())
    layout = FlatLayout.concatenated([(i, tuple(p.shape)) for i, p in enumerate(parameters)], 0, 1)
    master = torch.nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
    flat = torch.optim.AdamW([master], lr=optimizer.param_groups[0]["lr"])
    if states := list(optimizer.state.values()):
        flat.state[master] = {k: torch.cat([s[k].reshape(-1) for s in states]) for k in STATES[1:]}
        flat.state[master]["step"] = states[0]["step"].clone()
    return ShardedZeroProvider("optim", [Partition(layout, parameter=master)], optimizer=flat)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_what_was_saved_key_by_key_restores_into_an_optimizer(is_fresh: bool, tmp_path: Path) -> None:
    model, optimizer = _trained(1)
    ds.snapshot([_zero(model, optimizer)], tmp_path / "c").wait_committed()
    other = torch.optim.AdamW(model.parameters()) if is_fresh else _trained(2)[1]
    ds.restore([from_stateful("optim", other)], tmp_path / "c")
    assert equal(_states(other), _states(optimizer))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_what_was_saved_key_by_key_restores_into_containers(tmp_path: Path) -> None:
    model, optimizer = _trained(1)
    ds.snapshot([_zero(model, optimizer)], tmp_path / "c").wait_committed()
    live = {**_trained(2)[1].state_dict()}
    del live["param_groups"][0]["decoupled_weight_decay"], live["param_groups"][0]["lr"]
    restored = ds.restore([from_state_dict("optim", live)], tmp_path / "c", strict=False)
    assert restored.unexpected_keys == ["optim/param_groups/0/lr", "optim/param_groups/0/decoupled_weight_decay"]
    assert equal(live["state"], optimizer.state_dict()["state"])


def _without(state: Any, number: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """An optimizer's state without one parameter, and the arrays of that parameter by key."""
    gone = {f"state/{number}/{name}": tensor for name, tensor in state["state"][number].items()}
    return {**state, "state": {n: s for n, s in state["state"].items() if n != number}}, gone


@pytest.mark.parametrize("is_fresh", [True, False])
def test_states_that_another_rank_had_are_not_dropped(is_fresh: bool) -> None:
    model, optimizer = _trained(1)
    other = torch.optim.AdamW(model.parameters()) if is_fresh else _trained(2)[1]
    of_state_dict(*_without(optimizer.state_dict(), 2)).restore(from_stateful("optim", other))
    assert equal(_states(other), _states(optimizer))


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_rank_that_had_no_states_stands_for_none(is_fresh: bool) -> None:
    model, optimizer = _trained(1)
    other = torch.optim.AdamW(model.parameters()) if is_fresh else _trained(2)[1]
    state = optimizer.state_dict()
    others = {f"state/{n}/{name}": t for n, states in state["state"].items() for name, t in states.items()}
    of_state_dict({**state, "state": {}}, others).restore(from_stateful("optim", other))
    assert equal(_states(other), _states(optimizer))


@pytest.mark.parametrize("number", range(4))
def test_a_partition_takes_what_any_rank_had(number: int) -> None:
    """The listed arrays of one rank lack a parameter; the partition takes it from another rank."""
    model, optimizer = _trained(1)
    saved = of_state_dict(*_without(optimizer.state_dict(), number))
    for provider in (_zero(*_trained(2)), _zero(model, torch.optim.AdamW(model.parameters()))):
        found = saved.restore(provider)
        assert len(found.read) == 4 * len(STATES)
        assert found.differences == []
        (states,) = provider._optimizer.state.values()
        for state in STATES[1:]:
            expected = [optimizer.state[p][state].reshape(-1) for p in model.parameters()]
            assert torch.equal(states[state], torch.cat(expected))
        assert states["step"] == 1


def test_layers_that_another_rank_had_are_restored() -> None:
    model, other = _trained(1)[0], _trained(2)[0]
    state = model.state_dict()
    own, others = ({k: v for k, v in state.items() if k[0] == layer} for layer in "01")
    assert of_state_dict(own, others).restore(from_stateful("model", other)).differences == []
    assert equal(dict(other.state_dict()), dict(state))


def test_what_no_rank_had_is_missing() -> None:
    live = {
        "a": torch.zeros(2),
        "new": {"b": torch.zeros(3), "c": torch.zeros(4), "n": 7},
        "gone": {"d": torch.zeros(1)},
    }
    found = of_state_dict({"a": torch.ones(2)}, {"new/b": torch.ones(3)}).restore(from_state_dict("s", live))
    assert {shard.key for shard in found.read} == {"a", "new/b"}
    assert found.differences == found.missing == ["new/c", "new/n", "gone"]
    assert live["new"]["b"].sum() == 3  # type: ignore[index]


class ByName:
    """An optimizer whose state has the parameters' names as keys."""

    def __init__(self, *names: str) -> None:
        self.value: Any = {
            "state": {name: {"m": torch.zeros(2)} for name in names},
            "param_groups": [{"params": list(names), "lr": 0.0}],
        }

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def _saved_by_name(*names: str, others: Sequence[str] = ()) -> Checkpoint:
    base = ByName(*names).state_dict()
    for i, name in enumerate(names):
        base["state"][name]["m"].fill_(i + 1)
    base["param_groups"][0]["lr"] = 0.5
    return of_state_dict(base, {f"state/{name}/m": torch.full((2,), 9.0) for name in others})


def test_a_stage_takes_only_its_own_parameters() -> None:
    stage, saved = ByName("c", "b"), _saved_by_name("a", "b", "c")
    found = saved.restore(from_stateful("optim", stage))
    assert {shard.key for shard in found.read} == {"state/b/m", "state/c/m"}
    expected = {"c": {"m": torch.full((2,), 3.0)}, "b": {"m": torch.full((2,), 2.0)}}
    assert equal(dict(sorted(stage.value["state"].items())), dict(sorted(expected.items())))
    assert stage.value["param_groups"] == [{"params": ["c", "b"], "lr": 0.5}]
    assert found.differences == found.unexpected == ["state/a"]


def test_stages_are_merged() -> None:
    stage, saved = ByName("a", "b"), _saved_by_name("a", others=["b"])
    found = saved.restore(from_stateful("optim", stage))
    assert {shard.key for shard in found.read} == {"state/a/m", "state/b/m"}
    assert equal(stage.value["state"], {"a": {"m": torch.ones(2)}, "b": {"m": torch.full((2,), 9.0)}})
    assert stage.value["param_groups"] == [{"params": ["a", "b"], "lr": 0.5}]
    assert found.differences == []
