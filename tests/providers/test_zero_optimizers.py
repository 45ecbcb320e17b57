"""Optimizers over ZeRO's flat partitions: any number of ranks, or a plain optimizer, goes on from a checkpoint."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import in_memory
import pytest
import torch
import torch.distributed as dist
from zero_states import SHAPES, flat_of, layout_of, logical_state

import datastates as ds
from datastates.errors import ProviderError
from datastates.providers import FlatLayout, Partition, ShardedZeroProvider, from_stateful
from datastates.state.provider import StateProvider
from datastates.testing import ProviderTests, equal

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch warns while it imports the module
    from torch.distributed.optim import ZeroRedundancyOptimizer


# --- an optimizer over flat partitions, as hand-rolled loops and DeepSpeed have


def _train(optimizer: torch.optim.Optimizer, layouts: list[FlatLayout], steps: int, begin: int = 0) -> None:
    for step in range(begin, begin + steps):
        for group, layout in zip(optimizer.param_groups, layouts, strict=True):
            group["params"][0].grad = flat_of(layout, logical_state(10 + step))
        optimizer.step()


def _groups(rank: int, world: int) -> list[FlatLayout]:
    """Two parameter groups; the second has one parameter, of which some ranks hold only padding."""
    items = list(SHAPES.items())
    return [
        FlatLayout.concatenated(items[1:], rank, world, alignment=2),
        FlatLayout.concatenated([("tiny", (1,))], rank, world, alignment=2),
    ]


def _with_optimizer(
    rank: int, world: int, *, steps: int, lr: float = 0.1, **options: Any
) -> tuple[ShardedZeroProvider, Any, list[FlatLayout]]:
    logical = {"tiny": torch.tensor([2.5]), **logical_state(0)}
    layouts = _groups(rank, world)
    flats = [torch.nn.Parameter(flat_of(layout, logical)) for layout in layouts]
    optimizer = torch.optim.AdamW(
        [{"params": [flat], "weight_decay": 0.1 * i} for i, flat in enumerate(flats)], lr=lr, **options
    )
    for step in range(steps):
        for flat, layout in zip(flats, layouts, strict=True):
            flat.grad = flat_of(layout, {"tiny": torch.tensor([0.5 + step]), **logical_state(10 + step)})
        optimizer.step()
    partitions = [
        Partition(layout, {"fp32": flat}, parameter=flat, group=i)
        for i, (layout, flat) in enumerate(zip(layouts, flats, strict=True))
    ]
    return ShardedZeroProvider("zero", partitions, optimizer=optimizer), optimizer, layouts


@pytest.mark.parametrize("steps_before", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4), (4, 4), (8, 2)])
def test_an_optimizer_goes_on_as_if_nothing_had_happened(before: int, after: int, steps_before: int) -> None:
    """Restored on another number of ranks and stepped once more, it equals an unbroken run on that number."""
    checkpoint = in_memory.Checkpoint.of([_with_optimizer(rank, before, steps=3)[0] for rank in range(before)])
    assert checkpoint.is_tiled
    restored, unbroken = [], []
    for rank in range(after):
        provider, optimizer, layouts = _with_optimizer(rank, after, steps=steps_before, lr=7.0)
        saved = checkpoint.restore(provider, rank)
        assert saved.differences == []
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1]
        for flat, layout in zip((g["params"][0] for g in optimizer.param_groups), layouts, strict=True):
            flat.grad = flat_of(layout, {"tiny": torch.tensor([3.5]), **logical_state(13)})
        optimizer.step()
        restored.append(provider)
        unbroken.append(_with_optimizer(rank, after, steps=4)[0])
    got, wanted = in_memory.Checkpoint.of(restored), in_memory.Checkpoint.of(unbroken)
    assert equal(got.arrays, wanted.arrays)
    assert got.objects == wanted.objects
    assert got.is_tiled


def test_an_optimizer_without_state_takes_the_state_away() -> None:
    checkpoint = in_memory.Checkpoint.of([_with_optimizer(rank, 2, steps=0)[0] for rank in range(2)])
    provider, optimizer, _ = _with_optimizer(0, 1, steps=2)
    saved = checkpoint.restore(provider)
    assert saved.differences == []
    assert not optimizer.state


def test_states_that_the_checkpoint_lacks_go_away() -> None:
    checkpoint = in_memory.Checkpoint.of([_with_optimizer(0, 1, steps=2)[0]])
    provider, optimizer, _ = _with_optimizer(0, 1, steps=1, amsgrad=True)
    checkpoint.restore(provider)
    assert {name for state in optimizer.state.values() for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert not optimizer.param_groups[0]["amsgrad"]


def test_python_numbers_of_an_optimizer_stay_what_they_are(tmp_path: Path) -> None:
    def provider(value: dict[str, Any]) -> tuple[ShardedZeroProvider, Any]:
        layout = FlatLayout.concatenated([("w", (3,))], 0, 1)
        flat = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([flat], lr=0.1)
        optimizer.state[flat].update(value)
        return ShardedZeroProvider("zero", [Partition(layout, parameter=flat)], optimizer=optimizer), optimizer

    saving, _ = provider({"step": 12, "scale": 0.5, "m": torch.arange(3.0)})
    ds.snapshot([saving], tmp_path / "saved").wait_committed()
    for live in ({}, {"step": 1, "scale": 1.0, "m": torch.zeros(3)}, {"step": torch.tensor(3.0)}):
        restored, optimizer = provider(live)
        ds.restore([restored], tmp_path / "saved")
        (state,) = optimizer.state.values()
        kind = type(live.get("step", 0))
        assert (type(state["step"]), float(state["step"]), state["scale"]) == (kind, 12.0, 0.5)
        assert state["m"].tolist() == [0, 1, 2]
    refused, _ = provider({"history": [1, 2]})
    with pytest.raises(ProviderError, match="'state/w/history' is a list"):
        refused.shards()


def test_a_tensor_for_a_learning_rate_stays_that_tensor() -> None:
    provider, optimizer, _ = _with_optimizer(0, 1, steps=1, capturable=False)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    checkpoint = in_memory.Checkpoint.of([provider])
    rate.fill_(3)
    checkpoint.restore(provider)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def _plain_optimizer(steps: int) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    logical = logical_state(0)
    parameters = [torch.nn.Parameter(t.clone()) for t in logical.values()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for step in range(steps):
        for parameter, gradient in zip(parameters, logical_state(10 + step).values(), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return optimizer, parameters


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_an_unsharded_optimizer_restores_into_partitions(world: int, tensor_rate: bool) -> None:
    """A state dict by parameter name, as one process or FSDP2 saves it, is cut into the partitions' ranges."""
    optimizer, _ = _plain_optimizer(3)
    state = optimizer.state_dict()
    if tensor_rate:
        state["param_groups"][0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    names = list(SHAPES)
    state["state"] = {names[i]: s for i, s in state["state"].items()}
    state["param_groups"][0]["params"] = names
    checkpoint = in_memory.of_state_dict(state)
    ranks = []
    for rank in range(world):
        layout = layout_of("concatenated", rank, world)
        flat = torch.nn.Parameter(torch.zeros(layout.numel))
        sharded = torch.optim.AdamW([flat], lr=7.0)
        provider = ShardedZeroProvider("zero", [Partition(layout, parameter=flat)], optimizer=sharded)
        saved = checkpoint.restore(provider, rank)
        assert saved.differences == []
        assert sharded.param_groups[0]["lr"] == 0.1
        ranks.append(provider)
    arrays = {key: tensor for key, tensor in checkpoint.arrays.items() if key.startswith("state/")}
    assert equal(dict(sorted(in_memory.Checkpoint.of(ranks).arrays.items())), dict(sorted(arrays.items())))


# --- torch's ZeroRedundancyOptimizer, here on one rank


@pytest.fixture
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _zero_redundancy(steps: int) -> tuple[Any, list[torch.nn.Parameter]]:
    logical = logical_state(0)
    parameters = [torch.nn.Parameter(t.clone()) for t in logical.values()]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)
    for step in range(steps):
        for parameter, gradient in zip(parameters, logical_state(10 + step).values(), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return optimizer, parameters


@pytest.mark.usefixtures("_process_group")
def test_zero_redundancy_saves_what_its_consolidated_state_dict_has() -> None:
    optimizer, _ = _zero_redundancy(2)
    provider = ShardedZeroProvider.from_zero_redundancy("zero", optimizer)
    checkpoint = in_memory.Checkpoint.of([provider])
    optimizer.consolidate_state_dict()
    expected = in_memory.of_state_dict(optimizer.state_dict())
    assert equal(dict(sorted(checkpoint.arrays.items())), dict(sorted(expected.arrays.items())))
    assert checkpoint.objects[0]["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("steps", [0, 1])
def test_zero_redundancy_that_was_not_consolidated_loads_as_by_torch(steps: int, tmp_path: Path) -> None:
    saved, _ = _zero_redundancy(2)
    saved.consolidate_state_dict()
    torch.save(saved.state_dict(), tmp_path / "t.pt")
    ds.snapshot([from_stateful("optim", saved)], tmp_path / "c").wait_committed()
    (ours, _), (stock, _) = _zero_redundancy(steps), _zero_redundancy(steps)
    ds.restore([from_stateful("optim", ours)], tmp_path / "c")
    stock.load_state_dict(torch.load(tmp_path / "t.pt"))
    for optimizer in (ours, stock):
        optimizer.consolidate_state_dict()
    assert str(ours.state_dict()) == str(stock.state_dict()) == str(saved.state_dict())


@pytest.mark.usefixtures("_process_group")
def test_zero_redundancy_by_names() -> None:
    optimizer, parameters = _zero_redundancy(1)
    named = list(zip(SHAPES, parameters, strict=True))
    provider = ShardedZeroProvider.from_zero_redundancy("zero", optimizer, named)
    assert {s.key.split("/")[1] for s in provider.shards() if not s.is_object} == set(SHAPES)
    with pytest.raises(ValueError, match="lacks a parameter"):
        ShardedZeroProvider.from_zero_redundancy("zero", optimizer, named[1:])


@pytest.mark.usefixtures("_process_group")
def test_a_plain_optimizer_restores_into_zero_redundancy(tmp_path: Path) -> None:
    """This goes through files; both optimizers number their parameters alike."""
    plain, parameters = _plain_optimizer(3)
    ds.snapshot([from_stateful("optim", plain)], tmp_path / "saved").wait_committed()
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = ZeroRedundancyOptimizer(twins, torch.optim.AdamW, lr=5.0)
    ds.restore([ShardedZeroProvider.from_zero_redundancy("optim", optimizer)], tmp_path / "saved")
    for parameter, twin, gradient in zip(parameters, twins, logical_state(13).values(), strict=True):
        parameter.grad, twin.grad = gradient, gradient.clone()
    plain.step()
    optimizer.step()
    assert equal([p.detach() for p in parameters], [p.detach() for p in twins])
    optimizer.consolidate_state_dict()
    assert equal(plain.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.usefixtures("_process_group")
def test_channels_last_states_are_saved_by_element_not_by_memory() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))

    def make() -> tuple[Any, ShardedZeroProvider]:
        optimizer = ZeroRedundancyOptimizer([weight], torch.optim.AdamW, lr=0.1)
        return optimizer, ShardedZeroProvider.from_zero_redundancy("zero", optimizer)

    saving, provider = make()
    weight.grad = torch.randn(4, 3, 2, 2)
    saving.step()
    checkpoint = in_memory.Checkpoint.of([provider])
    average = saving.optim.state[weight]["exp_avg"]
    assert not average.is_contiguous()
    assert equal(checkpoint.arrays["state/0/exp_avg"], average)
    fresh, provider = make()
    checkpoint.restore(provider)
    assert fresh.optim.state[weight]["exp_avg"].stride() == average.stride()
    assert equal(fresh.optim.state[weight]["exp_avg"], average)


# --- what every provider promises


class TestFlatOptimizer(ProviderTests):
    steps = 2

    def provider(self) -> StateProvider:
        provider, optimizer, layouts = _with_optimizer(0, 1, steps=self.steps)
        provider.live = optimizer, layouts  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        optimizer, layouts = provider.live
        for group, layout in zip(optimizer.param_groups, layouts, strict=True):
            group["params"][0].grad = flat_of(layout, {"tiny": torch.tensor([1.0]), **logical_state(30)})
            group["lr"] *= 0.5
        optimizer.step()

    def state(self, provider: Any) -> object:
        """The state without padding."""
        optimizer, layouts = provider.live
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        held = []
        for group, layout in zip(optimizer.param_groups, layouts, strict=True):
            (flat,) = group["params"]
            every = {"fp32": flat.detach(), **optimizer.state.get(flat, {})}
            held.append({k: t.clone() if not t.ndim else self.cut(t, layout) for k, t in every.items()})
        return [copy.deepcopy(groups), held]

    def cut(self, flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
        return [flat[p.at : p.at + p.end - p.begin].clone() for p in layout.slices]


class TestFlatOptimizerWithoutState(TestFlatOptimizer):
    steps = 0


@pytest.mark.usefixtures("_process_group")
class TestZeroRedundancy(ProviderTests):
    steps = 2

    def provider(self) -> StateProvider:
        optimizer, parameters = _zero_redundancy(self.steps)
        provider = ShardedZeroProvider.from_zero_redundancy("zero", optimizer)
        provider.live = optimizer, parameters  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        optimizer, parameters = provider.live
        for parameter, gradient in zip(parameters, logical_state(30).values(), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    def state(self, provider: Any) -> object:
        optimizer, parameters = provider.live
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return copy.deepcopy([groups, [dict(optimizer.optim.state.get(p, {})) for p in parameters]])


class TestZeroRedundancyWithoutState(TestZeroRedundancy):
    steps = 0
