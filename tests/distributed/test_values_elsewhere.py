"""Values that are no arrays and that only other ranks saved, as stages of a pipeline cut otherwise need them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import datastates as ds
from datastates.providers import from_state_dict, from_stateful
from datastates.testing import equal

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _restore(threads: Any, live: Sequence[Any], path: Path) -> None:
    """Restore into a live object of each rank."""
    for restored in threads(len(live), lambda rank: ds.restore([from_stateful("o", live[rank])], path)):
        assert isinstance(restored, ds.Restored), restored


class _Chunks:
    """Chunks of a pipeline with an optimizer each, as one object: states by name and flattened, as of torchtitan."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.chunks: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = []
        for layer in layers:
            torch.manual_seed(layer)
            module = torch.nn.ModuleDict({f"l{layer}": torch.nn.Linear(2, 2)})
            self.chunks.append((module, torch.optim.AdamW(module.parameters(), lr=0.1 * (layer + 1))))

    def train(self) -> _Chunks:
        for module, optimizer in self.chunks:
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return self

    def state_dict(self) -> dict[str, Any]:
        states = [get_optimizer_state_dict(*chunk, options=_FLAT) for chunk in self.chunks]
        return {key: value for state in states for key, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for module, optimizer in self.chunks:
            set_optimizer_state_dict(module, optimizer, state, options=_FLAT)


def test_flattened_states_restore_onto_other_stages(tmp_path: Path, threads: Any) -> None:
    both = [_Chunks([0, 2]).train(), _Chunks([1, 3]).train()]
    threads(
        2, lambda r: ds.snapshot([from_stateful("o", both[r])], tmp_path / "c", rank=r, world_size=2).wait_committed()
    )
    whole = both[0].state_dict() | both[1].state_dict()
    for stages in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [2, 1], [0]]):
        live = [_Chunks(layers) for layers in stages]
        _restore(threads, live, tmp_path / "c")
        for state in (chunks.state_dict() for chunks in live):
            assert equal(state, {key: whole[key] for key in state})


class _Held:
    """An object that holds a state, and takes any."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_values_beside_arrays_that_another_rank_had_are_restored(tmp_path: Path, threads: Any) -> None:
    saved = [
        {"state": {f"p{r}": {"step": 5 + r, "m": torch.full((3,), float(r)), "betas": [r, torch.ones(r + 1)]}}, "n": r}
        for r in range(2)
    ]
    threads(
        2,
        lambda r: ds.snapshot(
            [from_stateful("o", _Held(saved[r]))], tmp_path / "c", rank=r, world_size=2
        ).wait_committed(),
    )
    states = saved[0]["state"] | saved[1]["state"]  # type: ignore[operator]
    fresh = {name: {"step": 0, "m": torch.zeros(3), "betas": [9, torch.zeros(r + 1)]} for r, name in enumerate(states)}
    live = _Held({"state": fresh, "n": 9, "new": 3})
    _restore(threads, [live], tmp_path / "c")
    assert equal(live.state, {"state": states, "n": 0})


class _Stage:
    """One stage of a pipeline, whose optimizer has groups with options of their own, as a state by parameter names."""

    def __init__(self, layers: Sequence[int], groups: Sequence[Sequence[str]] | None = None) -> None:
        self.module = torch.nn.ModuleDict({f"l{layer}": torch.nn.Linear(2, 2) for layer in layers})
        found = dict(self.module.named_parameters())
        names = groups or [[name] for name in found]
        self.optimizer = torch.optim.AdamW([{"params": [found[name] for name in group]} for group in names])

    def train(self) -> _Stage:
        for i, group in enumerate(self.optimizer.param_groups):
            layer = min(int(name[1]) for name, p in self.module.named_parameters() if p is group["params"][0])
            group.update(lr=0.1 * (layer + 1), weight_decay=0.01 * i, betas=(0.5, 0.6 + 0.1 * layer))
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        return self

    def by_name(self) -> dict[str, Any]:
        return {
            name: ({k: v for k, v in group.items() if k != "params"}, self.optimizer.state[parameter])
            for group in self.optimizer.param_groups
            for name, parameter in self.module.named_parameters()
            if any(parameter is one for one in group["params"])
        }

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.module, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.module, self.optimizer, state)


_GROUPS = (["l0.weight", "l1.weight"], ["l0.bias", "l1.bias"]), (["l2.weight"], ["l2.bias", "l3.bias"], ["l3.weight"])


def _save_stages(threads: Any, path: Path) -> dict[str, Any]:
    saved = [_Stage([0, 1], _GROUPS[0]).train(), _Stage([2, 3], _GROUPS[1]).train()]
    threads(2, lambda r: ds.snapshot([from_stateful("o", saved[r])], path, rank=r, world_size=2).wait_committed())
    return saved[0].by_name() | saved[1].by_name()


def test_options_of_groups_go_with_their_parameters_onto_other_stages(tmp_path: Path, threads: Any) -> None:
    whole = _save_stages(threads, tmp_path / "c")
    for stages in ([[0, 1, 2, 3]], [[2, 3], [0, 1]], [[0], [1, 2, 3]], [[3], [1], [2], [0]]):
        live = [_Stage(layers) for layers in stages]
        _restore(threads, live, tmp_path / "c")
        for stage in live:
            found = stage.by_name()
            assert equal(found, {name: whole[name] for name in found})


def test_options_of_groups_are_put_into_live_containers(tmp_path: Path, threads: Any) -> None:
    whole = _save_stages(threads, tmp_path / "c")
    live = [_Stage([2, 3], _GROUPS[1]).state_dict(), _Stage([0, 1], _GROUPS[0]).state_dict()]
    threads(2, lambda r: ds.restore([from_state_dict("o", live[r])], tmp_path / "c"))
    for state in live:
        for group in state["param_groups"]:
            for name in group["params"]:
                assert equal({k: v for k, v in group.items() if k != "params"}, whole[name][0])


def test_a_live_group_whose_parameters_had_other_options_is_refused(tmp_path: Path, threads: Any) -> None:
    _save_stages(threads, tmp_path / "c")
    live = _Stage([0, 1, 2, 3], [[f"l{layer}.{kind}" for layer in range(4) for kind in ("weight", "bias")]])
    (error,) = threads(1, lambda _: ds.restore([from_stateful("o", live)], tmp_path / "c"))
    assert isinstance(error, ds.errors.RestoreError)
    assert "o/param_groups/0" in str(error)
