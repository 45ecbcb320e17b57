"""The providers of this package pass its own suite, ``ProviderTests``."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch

import datastates as ds
from datastates.providers import (
    CompositeProvider,
    HostTensorProvider,
    PickledObjectProvider,
    RngProvider,
    from_state_dict,
    from_stateful,
)
from datastates.state.provider import StateProvider
from datastates.testing import ProviderTests


def small_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()


class TestModule(ProviderTests):
    def provider(self) -> StateProvider:
        provider = from_stateful("model", model := small_model())
        provider.live = model  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        with torch.no_grad():
            for tensor in provider.live.state_dict().values():
                tensor.add_(1)

    def state(self, provider: Any) -> object:
        return {k: v.clone() for k, v in provider.live.state_dict().items()}


class TestOptimizer(ProviderTests):
    steps = 2

    def provider(self) -> StateProvider:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(self.steps):
            train_step(model, optimizer)
        provider = from_stateful("optimizer", optimizer)
        provider.model, provider.live = model, optimizer  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        train_step(provider.model, provider.live)
        provider.live.param_groups[0]["lr"] *= 0.5

    def state(self, provider: Any) -> object:
        return copy.deepcopy(provider.live.state_dict())


class TestOptimizerWithoutState(TestOptimizer):
    steps = 0


class TestContainers(ProviderTests):
    def provider(self) -> StateProvider:
        state = {
            "tensors": [torch.arange(6.0).reshape(2, 3), (torch.ones(2), torch.zeros(2, dtype=torch.int32))],
            "array": np.arange(4.0),
            "inner": {"count": 3, 0: "zero", "0": None},
        }
        provider = from_state_dict("state", state)
        provider.live = state  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        live = provider.live
        live["tensors"][0].add_(1)
        live["tensors"][1][1].add_(1)
        live["array"] += 1
        live["inner"]["count"] += 1
        live["inner"][0] = "other"

    def state(self, provider: Any) -> object:
        return copy.deepcopy(provider.live)


class TestObject(ProviderTests):
    def provider(self) -> StateProvider:
        live: dict[str, Any] = {"epoch": 1, "best": torch.ones(3), "history": [1.5], "noise": np.ones(2)}
        provider = PickledObjectProvider("loop", get=lambda: live, set=live.update)
        provider.live = live  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        provider.live["epoch"] += 1
        provider.live["best"].mul_(2)
        provider.live["history"].append(2.5)
        provider.live["noise"] += 1

    def state(self, provider: Any) -> object:
        return copy.deepcopy(provider.live)


class TestRng(ProviderTests):
    def provider(self) -> StateProvider:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        return RngProvider()

    def perturb(self, provider: Any) -> None:
        random.random(), np.random.rand(), torch.rand(1)

    def state(self, provider: Any) -> object:
        return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


class TestHostTensors(ProviderTests):
    def provider(self) -> StateProvider:
        tensors = {"torch": torch.arange(5.0), "numpy": np.arange(5), "a/b": torch.ones(2, 2)}
        provider = HostTensorProvider("tensors", tensors)
        provider.live = tensors  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        for tensor in provider.live.values():
            tensor += 1

    def state(self, provider: Any) -> object:
        return copy.deepcopy(provider.live)


class TestComposite(ProviderTests):
    parts = (TestContainers(), TestObject(), TestHostTensors())

    def provider(self) -> StateProvider:
        children = [part.provider() for part in self.parts]
        provider = CompositeProvider("all", children)
        provider.live = children  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        for part, child in zip(self.parts, provider.live, strict=True):
            part.perturb(child)

    def state(self, provider: Any) -> object:
        return [part.state(child) for part, child in zip(self.parts, provider.live, strict=True)]


class LazyObject(StateProvider):
    """A provider with a lazy object, which is serialized in the background before the gate opens."""

    def __init__(self) -> None:
        super().__init__("lazy")
        self.live = {"n": 1}

    def shards(self) -> list[ds.Shard]:
        return [ds.object_shard("table", lazy=True), ds.array_shard("a", torch.ones(3))]

    def serialize(self, shard: ds.Shard) -> bytes:
        return ds.dumps(dict(self.live))

    def restore(self, shard: ds.Shard, value: Any) -> None:
        self.live = value


class TestLazyObject(ProviderTests):
    def provider(self) -> StateProvider:
        return LazyObject()

    def perturb(self, provider: Any) -> None:
        provider.live["n"] += 1

    def state(self, provider: Any) -> object:
        return dict(provider.live)
