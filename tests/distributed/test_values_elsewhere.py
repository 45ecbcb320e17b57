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
from datastates.providers import from_stateful
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
