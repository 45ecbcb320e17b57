"""Tensors that were views of one buffer are so after a restore into fresh objects, as with torch.load."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import datastates as ds
from datastates.providers import CompositeProvider, PickledObjectProvider, from_pytree, from_state_dict, from_stateful

NUMBERS = (*range(40),)


@dataclass
class Pair:
    """An object that is pickled as a whole."""

    flat: Any = None
    part: Any = None


@dataclass
class Holder:
    """Keeps the state that it is given."""

    state: Any = field(default_factory=dict)

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class FlatMomentum(torch.optim.Optimizer):
    """SGD whose momenta are views of one buffer, which is scaled as a whole."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        if not self.state[params[0]]:
            flat = torch.zeros(sum(p.numel() for p in params))
            for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                self.state[p]["momentum"] = part.view_as(p)
            self.state[params[0]]["flat"] = flat
        self.state[params[0]]["flat"].mul_(0.9)
        for p in params:
            self.state[p]["momentum"].add_(p.grad)
            p.sub_(self.param_groups[0]["lr"] * self.state[p]["momentum"])


class Training:
    def __init__(self, *, own_load: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 4)
        self.optimizer = FlatMomentum(self.model.parameters())
        if own_load:
            self.optimizer.register_load_state_dict_pre_hook(lambda *_: None)

    def train(self, steps: int) -> list[torch.Tensor]:
        inputs = torch.Generator().manual_seed(steps)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 8, generator=inputs)).square().mean().backward()
            self.optimizer.step()
        return [p.detach() for p in self.model.parameters()]

    def providers(self) -> list[ds.StateProvider]:
        optimizer = from_stateful("optim", self.optimizer)
        return [from_stateful("model", self.model), CompositeProvider("all", [optimizer])]


def _untied(training: Training) -> None:
    """Give each momentum memory of its own."""
    for state in training.optimizer.state.values():
        state.update({name: tensor.clone() for name, tensor in state.items()})


def _other_buffer(training: Training) -> None:
    """Give the momenta the places of each other in the buffer."""
    weight, bias = training.model.weight, training.model.bias
    flat = training.optimizer.state[weight]["flat"]
    training.optimizer.state[bias]["momentum"] = flat[:4]
    training.optimizer.state[weight]["momentum"] = flat[4:].view(4, 8)


BEFORE: dict[str, Callable[[Training], object]] = {
    "a fresh optimizer": lambda _: None,
    "as it was": lambda training: training.train(2),
    "apart": lambda training: (training.train(2), _untied(training)),
    "otherwise": lambda training: (training.train(2), _other_buffer(training)),
    "without some": lambda training: (training.train(2), training.optimizer.state.pop(training.model.bias)),
}


@pytest.mark.parametrize("own_load", [False, True])
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_momenta_that_are_views_of_one_buffer_go_on(before: Any, own_load: bool, tmp_path: Path) -> None:
    training = Training()
    training.train(4)
    ds.snapshot(training.providers(), tmp_path / "c").wait_committed()
    wanted = training.train(5)
    resumed = Training(own_load=own_load)
    before(resumed)
    ds.restore(resumed.providers(), tmp_path / "c")
    assert all(map(torch.equal, resumed.train(5), wanted))


def test_momenta_that_became_views_of_one_buffer_since_the_save_come_apart(tmp_path: Path) -> None:
    training = Training()
    training.train(4)
    _untied(training)
    ds.snapshot(training.providers(), tmp_path / "c").wait_committed()
    wanted = training.train(5)
    resumed = Training()
    resumed.train(2)
    ds.restore(resumed.providers(), tmp_path / "c")
    assert all(map(torch.equal, resumed.train(5), wanted))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return _leaves([value.flat, value.part]) if isinstance(value, Pair) else [value]


def _portrait(value: Any) -> list[bytes]:
    """The contents of all arrays, then again after each write of an array in turn: so it tells what they share."""
    leaves = _leaves(value)
    found = []
    for written in (None, *leaves):
        if written is not None and written.shape != ():
            written[...] = 1 - written
        found += [np.asarray(leaf).tobytes() for leaf in leaves]
    return found


def _stock(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _as_object(value: Any, folder: Path) -> Any:
    ds.snapshot([from_stateful("s", Holder(value))], folder).wait_committed()
    ds.restore([from_stateful("s", fresh := Holder())], folder)
    return fresh.state


def _as_pickled(value: Any, folder: Path) -> Any:
    found: list[Any] = []
    ds.snapshot([PickledObjectProvider("s", lambda: value, found.append)], folder).wait_committed()
    ds.restore([PickledObjectProvider("s", dict, found.append)], folder)
    return found[0]


def _in_a_list(value: Any, folder: Path) -> Any:
    """In an object that stands in live containers, where all else is restored in place."""
    ds.snapshot([from_state_dict("s", {"in": [Pair(*value.values())]})], folder).wait_committed()
    live = {"in": [Pair()]}
    ds.restore([from_state_dict("s", live)], folder)
    return live["in"][0]


def _as_tree(value: Any, folder: Path) -> Any:
    ds.snapshot([from_pytree("s", value)], folder).wait_committed()
    provider = from_pytree("s", {key: torch.zeros_like(tensor) for key, tensor in value.items()})
    ds.restore([provider], folder)
    return provider.tree


def _loaded_like(value: Any, folder: Path) -> Any:
    ds.snapshot([from_state_dict("s", value)], folder).wait_committed()
    return ds.load(folder, like={"s": {key: torch.zeros_like(tensor) for key, tensor in value.items()}})["s"]


WAYS = {
    "a tree": _as_tree,
    "load like": _loaded_like,
    "an object": _as_object,
    "a pickled value": _as_pickled,
    "a pickled object": _in_a_list,
}
PAIRS: dict[str, Callable[[torch.Tensor], Sequence[Any]]] = {
    "a tail": lambda t: (t, t[3:]),
    "two parts": lambda t: (t[:20], t[10:]),
    "a column": lambda t: (t, t.view(8, 5)[:, 2]),
    "every second": lambda t: (t[::2], t[1::2]),
    "the same": lambda t: (t, t),
    "with a gradient": lambda t: (t, t[4:].detach()),
    "a far part": lambda t: (t, t[33:]),
    "a common element among gaps": lambda t: (t[:1], t[:15:3]),
    "columns among gaps": lambda t: (t.view(4, 10)[:, 1], t.view(4, 10)[:2, :2]),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_two_views_share_memory_as_after_torch_load(pair: Any, way: Any, tmp_path: Path) -> None:
    flat, part = pair(torch.tensor(NUMBERS, dtype=torch.float32))
    value = {"flat": flat, "part": part}
    restored = _portrait(way(value, tmp_path / "c"))
    assert restored == _portrait(_stock(value)) == _portrait(value)


def test_columns_without_a_common_element_are_stored_without_what_lies_between(tmp_path: Path) -> None:
    flat = torch.arange(20000.0).view(20, 1000)
    value = {"one": flat[:, 1], "other": flat[:, 500]}
    ds.snapshot([from_state_dict("s", value)], tmp_path / "c").wait_committed()
    assert sum(file.stat().st_size for file in (tmp_path / "c").rglob("*") if file.is_file()) < flat.nbytes // 2
    assert _portrait(ds.load(tmp_path / "c")["s"]) == _portrait({key: array.clone() for key, array in value.items()})


@pytest.mark.parametrize("way", [_as_object, _as_pickled])
def test_arrays_of_numpy_come_apart_as_with_torch_load(way: Any, tmp_path: Path) -> None:
    flat = np.array(NUMBERS, np.float32)
    value = {"flat": flat, "same": flat, "part": flat[3:], "column": flat.reshape(8, 5)[:, 1]}
    assert _portrait(way(value, tmp_path / "c")) == _portrait(_stock(value))


VIEW = st.tuples(st.integers(0, 2), st.integers(0, 19), st.integers(1, 12), st.integers(1, 3), st.booleans())


@settings(max_examples=50)
@given(st.lists(VIEW, min_size=1, max_size=8))
def test_random_views_of_three_buffers(tmp_path_factory: pytest.TempPathFactory, views: Any) -> None:
    buffers = [torch.tensor(NUMBERS[:20], dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int16)]
    made = {}
    for number, (buffer, begin, length, step, nested) in enumerate(views):
        view = buffers[buffer][begin : begin + length * step : step]
        made[str(number)] = {"inner": [view]} if nested else view
    folder = tmp_path_factory.mktemp("views")
    for way in (_as_object, _as_pickled):
        assert _portrait(way(made, folder / way.__name__)) == _portrait(_stock(made))
