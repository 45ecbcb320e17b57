"""A snapshot of a state that was saved before saves what has changed; an unchanged one is not described again."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import datastates as ds
from datastates.providers import HostTensorProvider, PickledObjectProvider, RngProvider, from_state_dict, from_stateful
from datastates.state.provider import StateProvider
from datastates.state.shards import Shards
from datastates.testing import equal


def _state() -> dict[str, Any]:
    return {
        "weights": OrderedDict((f"layer{i}", torch.randn(3, 4)) for i in range(4)),
        "square": torch.randn(4, 4),
        "groups": [
            {"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]},
            {"lr": 0.1, "betas": (0.9, 0.99), "params": [2]},
        ],
        "state": {i: {"step": torch.tensor(float(i)), "exp_avg": torch.randn(5)} for i in range(3)},
        "nothing": {},
        "epoch": 3,
    }


def _swap(mapping: dict[str, Any]) -> None:
    mapping["layer0"], mapping["layer1"] = mapping["layer1"], mapping["layer0"]


def _reorder(mapping: dict[str, Any]) -> None:
    mapping["layer0"] = mapping.pop("layer0")


def _alias(state: dict[str, Any]) -> None:
    state["state"][1] = state["state"][0]


def _transpose(state: dict[str, Any]) -> None:
    state["square"].data = state["square"].data.t()


MUTATIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda s: None,
    "contents": lambda s: s["weights"]["layer0"].add_(1),
    "a plain value": lambda s: s["groups"][0].update(lr=0.05),
    "a plain value's type": lambda s: s.update(epoch=True),
    "the sign of zero": lambda s: s.update(epoch=-0.0),
    "a plain value becomes an array": lambda s: s.update(epoch=torch.ones(2)),
    "an array becomes a plain value": lambda s: s.update(square=1.5),
    "an array becomes one of NumPy": lambda s: s.update(square=np.ones((4, 4), np.float32)),
    "an array becomes a list": lambda s: s.update(square=[1, 2]),
    "another tensor": lambda s: s["weights"].update(layer2=torch.randn(3, 4)),
    "another shape": lambda s: s["weights"].update(layer2=torch.randn(7)),
    "the same memory, another shape": lambda s: s["weights"]["layer1"].resize_(2, 6),
    "the same memory transposed": _transpose,
    "the same memory, another type": lambda s: s.update(square=s["square"].view(torch.int32)),
    "the same memory negated": lambda s: s.update(square=torch._neg_view(s["square"])),
    "a part of the same memory": lambda s: s.update(square=s["square"][:2]),
    "a view of a neighbour": lambda s: s.update(square=s["weights"]["layer0"][1]),
    "two tensors swapped": lambda s: _swap(s["weights"]),
    "another order": lambda s: _reorder(s["weights"]),
    "a new key": lambda s: s["weights"].update(more=torch.randn(2)),
    "a key less": lambda s: s["weights"].pop("layer3"),
    "a renamed key": lambda s: s["weights"].update(other=s["weights"].pop("layer3")),
    "a key of another type": lambda s: s["state"].update({"2": s["state"].pop(2)}),
    "another container": lambda s: s.update(groups=tuple(s["groups"])),
    "a container that is in it twice": _alias,
    "a gradient wanted": lambda s: s["square"].requires_grad_(),
    "a parameter": lambda s: s.update(square=nn.Parameter(s["square"])),
    "an object": lambda s: s.update(epoch=Path("somewhere")),
}


@pytest.mark.parametrize("made", ["once", "anew"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_changed_since_the_last_snapshot_is_saved(mutation: str, made: str, tmp_path: Path) -> None:
    state = _state()
    once = from_state_dict("s", state)

    def providers() -> list[StateProvider]:
        return [once if made == "once" else from_state_dict("s", state)]

    with ds.Checkpointer(tmp_path, max_in_flight=1) as checkpointer:
        for step in range(2):
            checkpointer.snapshot(providers(), step=step)
        checkpointer.gate()
        MUTATIONS[mutation](state)
        expected = copy.deepcopy({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in state.items()})
        for step in (2, 3):
            checkpointer.snapshot(providers(), step=step)
        flags = {k: v.requires_grad for k, v in state.items() if isinstance(v, torch.Tensor)}
        kinds = {k: type(v) for k, v in state.items()}
    for step in (2, 3):
        loaded = ds.load(tmp_path / f"step-{step:08d}", trust="all")["s"]
        assert equal(loaded, expected)
        assert {k: v.requires_grad for k, v in loaded.items() if isinstance(v, torch.Tensor)} == flags
        assert {k: type(v) for k, v in loaded.items()} == kinds
        assert list(loaded["weights"]) == list(expected["weights"])
        assert str(loaded["epoch"]) == str(expected["epoch"])
        if mutation == "a container that is in it twice":
            assert loaded["state"][0] is loaded["state"][1]


def test_an_unchanged_state_is_not_described_again(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    providers = [
        from_stateful("model", model),
        from_stateful("optim", optimizer),
        HostTensorProvider("more", {"a": torch.zeros(3)}),
        RngProvider(),
        PickledObjectProvider("loop", get=lambda: {"epoch": 1}, set=print),
    ]

    def train() -> None:
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()

    train()
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot(providers, step=0)
        before = [p.shards() for p in providers[:3]]
        train()
        after = [p.shards() for p in providers[:3]]
        for first, second in zip(before, after, strict=True):
            assert isinstance(first, Shards)
            assert isinstance(second, Shards)
            assert first.layout is second.layout
        checkpointer.snapshot(providers, step=1)
        expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loaded = ds.load(tmp_path)
    assert equal((loaded["model"], loaded["optim"]), expected)


def test_shards_of_an_unchanged_state_are_those_of_the_first_time() -> None:
    provider = HostTensorProvider("m", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)})
    first, second = provider.shards(), provider.shards()
    assert [s.key for s in second] == ["a", "b"]
    assert second[0].source is first[0].source
    assert second[0].buffer is not None
    assert second[0].buffer.owner is first[0].source
    assert second[-1].key == "b"
    assert [s.key for s in second[1:]] == ["b"]
    with pytest.raises(IndexError):
        second[2]


def test_a_parameter_that_becomes_a_buffer_is_no_longer_lazy() -> None:
    model = nn.Linear(3, 3)
    provider = from_stateful("m", model)
    assert [s.lazy for s in provider.shards() if not s.is_object] == [True, True]
    weight = model.weight.data
    del model.weight
    model.register_buffer("weight", weight)
    assert {s.key: s.lazy for s in provider.shards() if not s.is_object} == {"weight": False, "bias": True}


class _OwnStateDict(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"mine/" + k: v for k, v in super().state_dict(*args, **kwargs).items()}


def test_a_state_dict_of_the_users_own_is_asked(tmp_path: Path) -> None:
    model = _OwnStateDict(2, 2)
    provider = from_stateful("m", model)
    for _ in range(3):
        shards = [s for s in provider.shards() if not s.is_object]
        assert [s.key for s in shards] == ["mine~1weight", "mine~1bias"]
        assert all(s.lazy for s in shards)


def test_a_state_that_is_built_anew_is_not_kept_alive(tmp_path: Path) -> None:
    built: list[weakref.ref[torch.Tensor]] = []

    def build() -> dict[str, torch.Tensor]:
        tensor = torch.randn(1000)
        built.append(weakref.ref(tensor))
        return {"t": tensor}

    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            checkpointer.snapshot([from_state_dict("s", build)], step=step).wait_committed()
        provider = from_state_dict("s", build)
        for step in range(3, 6):
            checkpointer.snapshot([provider], step=step).wait_committed()
        checkpointer.wait()
        gc.collect()
        assert len(built) == 6
        assert [ref() for ref in built] == [None] * 6
