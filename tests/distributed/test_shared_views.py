"""Views of one buffer that one of several ranks wrote for all are views of one buffer on every rank after a restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_state import SMALL

import datastates as ds
from datastates.providers import CompositeProvider, ReplicatedProvider, from_stateful


def _optimizer(*, trained: bool) -> torch.optim.Optimizer:
    """An optimizer of four parameters, whose states are views of two buffers."""
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
    made = torch.optim.SGD(parameters, momentum=0.9)
    buffers = torch.arange(6.0), torch.arange(6.0) + 10
    for number, parameter in enumerate(parameters) if trained else ():
        flat = buffers[number // 2]
        made.state[parameter] = {"momentum_buffer": flat[3 * (number % 2) :][:3], "flat": flat}
    return made


def _portrait(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """The states after each of the buffers has been changed by another number."""
    states = list(optimizer.state.values())
    for number in (0, 2):
        states[number]["flat"].add_(100 * (number + 1))
    return [state[name].tolist() for state in states for name in ("momentum_buffer", "flat")]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("lazy", [True, False])
def test_states_that_ranks_share_out(ranks: int, lazy: bool, threads: Any, tmp_path: Path) -> None:
    def provider(optimizer: Any, ranks: int) -> ds.StateProvider:
        inner = CompositeProvider("c", [from_stateful("optim", optimizer, lazy=lazy)])
        return ReplicatedProvider(inner, range(ranks))

    def save(rank: int) -> None:
        one = provider(_optimizer(trained=True), 2)
        ds.snapshot([one], tmp_path / "step-00000001", step=1, **SMALL).wait_committed()

    def restore(rank: int) -> list[list[float]]:
        fresh = _optimizer(trained=False)
        ds.restore([provider(fresh, ranks)], tmp_path / "step-00000001", **SMALL)
        return _portrait(fresh)

    assert threads(2, save) == [None] * 2
    assert threads(ranks, restore) == [_portrait(_optimizer(trained=True))] * ranks
