"""A restore does not call ``state_dict()`` of an object that has nothing to say about it: the call may have effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates.providers import from_stateful


class Position:
    """Counts calls. Its ``state_dict()`` begins an epoch, which draws random numbers."""

    def __init__(self, taken: Callable[[], Any]) -> None:
        self.calls: list[str] = []
        self.state: Any = None
        self._taken = taken

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        torch.rand(3), np.random.random(3), random.random()
        self.state = {"taken": self._taken()}
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.calls.append("load_state_dict")
        self.state = state


class Loader(Position):
    """The same, as an object that is iterated over."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


NUMBERS = {
    "a number": lambda: 3,
    "torch's generator": torch.get_rng_state,
    "NumPy's generator": lambda: np.random.get_state(),
    "an order": lambda: torch.arange(7),
    "fractions": lambda: torch.linspace(0, 1, 5),
    "nothing": dict,
}


def _drawn() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), np.random.random(2).tolist(), random.random()


def _seed() -> None:
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(np.all(a == b))


@pytest.mark.parametrize("taken", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("kind", [Position, Loader])
def test_a_restore_of_an_object_draws_no_random_numbers(tmp_path: Path, kind: type[Position], taken: Any) -> None:
    saved = kind(taken)
    stock = saved.state_dict()
    ds.snapshot([from_stateful("data", saved)], tmp_path / "c").wait_committed()
    after = []
    for load in (
        lambda to: to.load_state_dict(stock),
        lambda to: ds.restore([from_stateful("data", to)], tmp_path / "c"),
    ):
        _seed()
        load(fresh := kind(taken))
        after.append(_drawn())
        assert fresh.calls == ["load_state_dict"]
    assert after[0] == after[1]
    assert _same(fresh.state["taken"], saved.state["taken"])


def test_a_comparison_does_not_call_it_either(tmp_path: Path) -> None:
    ds.snapshot([from_stateful("data", Loader(torch.get_rng_state))], tmp_path / "c").wait_committed()
    fresh = Loader(torch.get_rng_state)
    assert ds.compare([from_stateful("data", fresh)], tmp_path / "c").fits
    assert fresh.calls == []
