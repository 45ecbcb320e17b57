"""New provider objects for a state that was saved before reuse what is known of it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates as ds
from datastates.providers import (
    CompositeProvider,
    FlatLayout,
    GpuTensorProvider,
    HostTensorProvider,
    Partition,
    ReplicatedProvider,
    ShardedZeroProvider,
    from_state_dict,
    from_stateful,
)
from datastates.providers.nested.skeleton import Skeleton
from datastates.providers.optimizer.shares import WholeParameter
from datastates.saving import collect
from datastates.saving.container_frame import ContainerFraming
from datastates.state import arrays, known_layout
from datastates.state.known_layout import Describer
from datastates.state.provider import StateProvider
from datastates.state.shards import Shards
from datastates.testing import equal

STATE: dict[str, Any] = {"layers": {str(i): torch.full((3, 2), float(i)) for i in range(4)}, "epoch": 1}
MODEL = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
MODEL(torch.randn(8, 4)).sum().backward()
OPTIMIZER.step()


def _zero(name: str) -> StateProvider:
    shares = [WholeParameter(i, p, 0) for i, p in enumerate(MODEL.parameters())]
    return ShardedZeroProvider(name, shares, optimizer=OPTIMIZER)


MAKERS: dict[str, Callable[[], StateProvider]] = {
    "module": lambda: from_stateful("s", MODEL),
    "optimizer": lambda: from_stateful("s", OPTIMIZER),
    "containers": lambda: from_state_dict("s", STATE),
    "containers that are built anew": lambda: from_state_dict("s", lambda: {**STATE, "epoch": 2}),
    "containers, lazy by key": lambda: from_state_dict("s", STATE, lazy=lambda key: key.endswith("1")),
    "arrays": lambda: HostTensorProvider("s", STATE["layers"]),
    "replicated": lambda: ReplicatedProvider(from_stateful("s", MODEL)),
    "shares": lambda: _zero("s"),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the expensive functions, by name."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    count(Skeleton, "of")
    count(known_layout, "_alone")
    count(arrays, "shards_of")
    count(collect, "_structure")
    count(ContainerFraming, "plan")
    return counted


@pytest.mark.parametrize("kind", MAKERS)
def test_a_known_state_is_not_described_again(kind: str, calls: Counter[str], tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            checkpointer.snapshot([MAKERS[kind]()], step=step)
            if step == 0:
                assert calls["plan"] == calls["_structure"] == 1
                calls.clear()
        assert not calls
    assert equal(ds.load(tmp_path, step=2), ds.load(tmp_path, step=0))


def test_the_children_of_a_composite_are_not_described_again(calls: Counter[str], tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(2):
            calls.clear()
            checkpointer.snapshot(
                [CompositeProvider("c", [from_stateful("m", MODEL), from_stateful("o", OPTIMIZER)])], step=step
            )
    assert set(calls) == {"_structure"}
    assert equal(ds.load(tmp_path, step=1), ds.load(tmp_path, step=0))


def test_another_objects_state_is_seen(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as checkpointer:
        for step in range(20):
            model = nn.Linear(5, 3)  # perhaps at the address of the last one
            checkpointer.snapshot([from_stateful("m", model)], step=step).wait_committed()
            assert equal(ds.load(tmp_path, step=step)["m"], model.state_dict())
            del model


def test_a_provider_of_another_class_learns_nothing(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot([HostTensorProvider("s", tensors)], step=0)
        with pytest.raises(TypeError, match="not on a GPU"):
            checkpointer.snapshot([GpuTensorProvider("s", tensors)], step=1)
        checkpointer.snapshot([from_state_dict("s", tensors)], step=2)
    assert equal(ds.load(tmp_path, step=2)["s"], tensors)


@pytest.mark.parametrize("first", [True, False])
def test_what_is_lazy_is_the_new_providers_own_to_say(first: bool, tmp_path: Path) -> None:
    seen = []
    with ds.Checkpointer(tmp_path) as checkpointer:
        for lazy in (first, not first, lambda key: key.endswith("0")):
            provider = from_state_dict("s", STATE, lazy=lazy)
            checkpointer.snapshot([provider], step=len(seen))
            seen.append([s.lazy for s in provider.shards() if not s.is_object])
    assert seen == [[first] * 4, [not first] * 4, [True, False, False, False]]


def test_what_is_said_of_replicas_is_the_new_providers_own_to_say() -> None:
    providers = [ReplicatedProvider(HostTensorProvider("s", STATE["layers"]), ranks) for ranks in ([0, 1], [0, 2])]
    knowledge = known_layout.Knowledge()
    replicas = []
    for provider in providers:
        knowledge.teach([provider])
        replicas.append({s.replicas for s in provider.shards()})
        knowledge.take([provider])
    assert replicas == [{(0, 1)}, {(0, 2)}]


def test_shares_of_other_parameters_are_seen() -> None:
    tensors = {"exp_avg": torch.arange(4.0)}
    knowledge = known_layout.Knowledge()
    keys = []
    for names in (["a", "b"], ["a", "b"], ["b", "a"]):
        layout = FlatLayout.concatenated([(name, (2,)) for name in names], 0, 1)
        provider = ShardedZeroProvider("s", [Partition(layout, tensors)])
        knowledge.teach([provider])
        shards = provider.shards()
        assert isinstance(shards, Shards)
        keys.append((shards.layout, [s.key for s in shards.layout]))
        knowledge.take([provider])
    assert keys[0][0] is keys[1][0]
    assert [k for _, k in keys[1:]] == [["state/a/exp_avg", "state/b/exp_avg"], ["state/b/exp_avg", "state/a/exp_avg"]]


def test_what_is_known_keeps_nothing_alive(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as checkpointer:
        model = nn.Linear(5, 3)
        gone = [weakref.ref(model), weakref.ref(model.weight)]
        checkpointer.snapshot([from_stateful("m", model)], step=0).wait_committed()
        checkpointer.wait()
        del model
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


def test_a_negative_view_in_a_dead_tensors_place_is_seen() -> None:
    """A new object may get the id of one that is gone, so an equal id proves nothing."""
    base = torch.arange(1.0, 5.0)
    for _ in range(20):
        describer = Describer()
        tensor = base.view(4)
        described = describer.describe(["t"], [tensor], [True])
        assert isinstance(described, Shards)
        layout = described.layout
        del described, tensor
        negated = [torch._neg_view(base) for _ in range(50)]
        for view in negated:
            assert getattr(describer.describe(["t"], [view], [True]), "layout", None) is not layout
