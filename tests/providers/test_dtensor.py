"""DTensors in one process: described, restored, recognized again, and refused where they are no part of a tensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hold import held
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _utils as torch_utils
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

import datastates as ds
from datastates.errors import ProviderError, TornSnapshotError
from datastates.providers import (
    CompositeProvider,
    DTensorProvider,
    HostTensorProvider,
    ReplicatedProvider,
    RngProvider,
    from_state_dict,
    from_stateful,
)
from datastates.state import dtensors, versions
from datastates.state.provider import StateProvider
from datastates.state.shards import Shards
from datastates.testing import ProviderTests


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def sharded(tensor: torch.Tensor, *placements: Any) -> DTensor:
    return distribute_tensor(tensor, mesh(), placements or [Shard(0)])


def local(value: Any) -> Any:
    """A copy of a nested value, with local tensors in place of DTensors."""
    if isinstance(value, dict):
        return {k: local(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return dtensors.local(value).detach().clone()
    return [local(v) for v in value] if isinstance(value, (list, tuple)) else value


def model() -> nn.Module:
    torch.manual_seed(5)
    return fully_shard(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), mesh=mesh())


def train(live: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    live(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()


class TestDTensors(ProviderTests):
    def provider(self) -> StateProvider:
        live = {"w": sharded(torch.arange(12.0).reshape(4, 3)), "b": sharded(torch.ones(3), Replicate())}
        provider = DTensorProvider("d", live)
        provider.live = live  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        for tensor in provider.live.values():
            tensor.add_(1)

    def state(self, provider: Any) -> object:
        return local(provider.live)


class TestTree(TestDTensors):
    def provider(self) -> StateProvider:
        live = {"w": [sharded(torch.arange(12.0).reshape(4, 3))], "step": torch.zeros(())}
        provider = from_state_dict("d", live)
        provider.live = live  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        provider.live["w"][0].add_(1)
        provider.live["step"].add_(1)


class TestFsdpModule(ProviderTests):
    def provider(self) -> StateProvider:
        provider = from_stateful("model", live := model())
        provider.live = live  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        with torch.no_grad():
            for tensor in provider.live.state_dict().values():
                tensor.add_(1)

    def state(self, provider: Any) -> object:
        return local(provider.live.state_dict())


class TestFsdpOptimizer(ProviderTests):
    def provider(self) -> StateProvider:
        live = model()
        optimizer = torch.optim.AdamW(live.parameters(), lr=0.1, fused=False)
        train(live, optimizer)
        provider = from_stateful("optimizer", optimizer)
        provider.model, provider.live = live, optimizer  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        train(provider.model, provider.live)

    def state(self, provider: Any) -> object:
        return local(provider.live.state_dict())


class TestReplicated(ProviderTests):
    def provider(self) -> StateProvider:
        live = {"a": torch.arange(3.0), "n": 1}
        provider = ReplicatedProvider(from_state_dict("r", live))
        provider.live = live  # type: ignore[attr-defined]
        return provider

    def perturb(self, provider: Any) -> None:
        provider.live["a"].add_(1)
        provider.live["n"] += 1

    def state(self, provider: Any) -> object:
        return local(provider.live)


def test_a_fresh_optimizer_gets_states_placed_like_its_parameters(tmp_path: Path) -> None:
    live = model()
    live[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(live.parameters(), lr=0.1, fused=False)
    train(live, optimizer)
    ds.snapshot([from_stateful("optimizer", optimizer)], tmp_path / "saved").wait_committed()
    fresh = torch.optim.AdamW(live.parameters(), lr=0.3, fused=False)
    ds.restore([from_stateful("optimizer", fresh)], tmp_path / "saved")
    assert fresh.param_groups[0]["lr"] == 0.1
    assert live[0].bias not in fresh.state
    for parameter, state in optimizer.state.items():
        made = fresh.state[parameter]
        assert type(made["step"]) is torch.Tensor
        assert made["exp_avg"].placements == parameter.placements
        assert all(torch.equal(local(made[name]), local(state[name])) for name in state)


def test_torch_load_sees_the_local_tensors(tmp_path: Path) -> None:
    state = {"w": sharded(torch.arange(6.0)), "p": nn.Parameter(sharded(torch.ones(2)))}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "saved").wait_committed()
    loaded = torch.load(tmp_path / "saved" / "rank-00000.pt")["s"]
    assert {k: type(v) for k, v in loaded.items()} == {"w": torch.Tensor, "p": nn.Parameter}
    assert torch.equal(loaded["w"], torch.arange(6.0))


def test_parameters_are_lazy_and_buffers_are_not() -> None:
    lazy = {s.key: s.lazy for s in from_stateful("model", model()).shards() if not s.is_object}
    assert {key for key, is_lazy in lazy.items() if not is_lazy} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


# --- described anew only where more than the contents has changed


def _layout(provider: StateProvider) -> object:
    shards = provider.shards()
    assert isinstance(shards, Shards)
    return shards.layout


SAME: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda s: None,
    "contents": lambda s: s["w"].add_(1),
    "another DTensor of the same memory": lambda s: s.update(w=s["w"].detach()),
    "a plain value": lambda s: s.update(n=2),
}
OTHER: dict[str, Callable[[dict[str, Any]], object]] = {
    "other memory": lambda s: s.update(w=s["w"].clone()),
    "another local tensor": lambda s: setattr(s["w"], "_local_tensor", s["w"]._local_tensor.clone()),
    "another placement": lambda s: s.update(w=DTensor.from_local(s["w"]._local_tensor, mesh(), [Replicate()])),
    "a plain tensor of the same memory": lambda s: s.update(w=s["w"]._local_tensor),
    "a parameter": lambda s: s.update(w=nn.Parameter(s["w"])),
    "negated": lambda s: setattr(s["w"], "_local_tensor", torch._neg_view(s["w"]._local_tensor)),
}


@pytest.mark.parametrize("mutation", [*SAME, *OTHER])
def test_what_has_not_changed_is_known_again(mutation: str) -> None:
    state = {"w": sharded(torch.arange(12.0).reshape(4, 3)), "x": sharded(torch.ones(2)), "t": torch.ones(3), "n": 1}
    provider = from_state_dict("s", state)
    layout = _layout(provider)
    {**SAME, **OTHER}[mutation](state)
    after = provider.shards()
    assert (isinstance(after, Shards) and after.layout is layout) == (mutation in SAME)
    tensor = state["w"]
    assert after[0].source is tensor
    pointer = dtensors.local(tensor).data_ptr()
    assert after[0].buffer is not None
    assert (after[0].buffer.pointer == pointer) == (mutation != "negated")


def test_a_change_by_the_dtensor_and_one_by_its_local_tensor_are_seen() -> None:
    tensors = [sharded(torch.ones(4)), torch.ones(2), sharded(torch.ones(2))]
    before, addresses = versions.witness(tensors)
    assert addresses.tolist() == [dtensors.local(t).data_ptr() for t in tensors]
    tensors[0].add_(1)
    tensors[2]._local_tensor.add_(1)
    after, _ = versions.witness(tensors)
    assert (after != before).tolist() == [True, False, True]
    with torch.inference_mode():
        counted = versions.witness([*tensors, sharded(torch.ones(2))])[0]
    assert counted.tolist() == [*after.tolist(), -1]


def test_a_write_to_a_dtensor_that_passes_no_gate_fails_the_snapshot_by_its_key(tmp_path: Path) -> None:
    state = {"w": sharded(torch.zeros(2**20)), "d": sharded(torch.ones(2**20))}
    with ds.Checkpointer(tmp_path, host_cache="2MiB", block="1MiB", io_threads=1) as checkpointer:
        with held():
            snapshot = checkpointer.snapshot([from_state_dict("x", state)], step=1)
            state["d"].mul_(1)  # the contents do not change; only torch's version counter shows this write
        with pytest.raises(TornSnapshotError, match="'x/d'"):
            snapshot.wait_committed()


# --- refused


@dataclass
class Holder:
    tensor: Any


def test_what_is_no_part_is_refused_by_name() -> None:
    partial = DTensor.from_local(torch.ones(2), mesh(), [Partial()])
    with pytest.raises(ProviderError, match=r"'x/w' is a DTensor placed .*redistribute"):
        from_state_dict("s", {"x": {"w": partial}}).shards()
    meta = DTensor.from_local(torch.ones(2, device="meta"), mesh(), [Shard(0)])
    with pytest.raises(ProviderError, match=r"'w' is a DTensor whose local tensor cannot be stored.*meta"):
        from_state_dict("s", {"w": meta}).shards()
    pieces = LocalShardsWrapper([torch.ones(2, 3)] * 2, [(0, 0), (2, 0)])
    several = DTensor.from_local(pieces, mesh(), [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1))
    with pytest.raises(ProviderError, match=r"'w' is a DTensor.*local_shards\(\) by array_shard"):
        from_state_dict("s", {"w": several}).shards()
    with pytest.raises(ProviderError, match=r"'w' \(Holder\).*holds a DTensor"):
        from_state_dict("s", {"w": Holder(sharded(torch.ones(2)))}).shards()


def test_hooks_of_a_sharded_module_get_its_state(tmp_path: Path) -> None:
    saved, live = model(), model()
    with torch.no_grad():
        for tensor in saved.parameters():
            tensor.add_(1)
    live.register_load_state_dict_pre_hook(lambda module, state, *_: state.update({"0.bias": state["0.bias"] * 2}))
    ds.snapshot([from_stateful("m", saved)], tmp_path / "c").wait_committed()
    ds.restore([from_stateful("m", live)], tmp_path / "c")
    expected = local(saved.state_dict())
    expected["0.bias"] *= 2
    assert all(torch.equal(tensor, expected[name]) for name, tensor in local(live.state_dict()).items())


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    tensor = sharded(torch.ones(4, 2))
    tensor._local_tensor = tensor._local_tensor[:3]
    with pytest.raises(
        ProviderError, match=r"'w' is a DTensor of shape \(4, 2\) with a local tensor of shape \(3, 2\)"
    ):
        DTensorProvider("d", {"w": tensor}).shards()


def test_other_providers_of_arrays_take_dtensors_too() -> None:
    shards = HostTensorProvider("h", {"w": sharded(torch.ones(4)), "t": torch.ones(2)}).shards()
    assert [(s.global_shape, s.offset, s.replicas) for s in shards] == [((4,), (0,), ()), ((2,), (0,), ())]


def test_state_of_the_model_and_of_each_rank_do_not_mix() -> None:
    state = from_state_dict("s", {"n": 1})
    assert not CompositeProvider("all", [state]).per_rank
    assert CompositeProvider("all", [RngProvider("a"), RngProvider("b")]).per_rank
    assert not CompositeProvider("none", []).per_rank
    with pytest.raises(ValueError, match="'all': 'rng' is state of each rank"):
        CompositeProvider("all", [state, RngProvider()])
    with pytest.raises(ValueError, match="'rng' is state of each rank"):
        ReplicatedProvider(RngProvider())
    with pytest.raises(ValueError, match="distinct"):
        ReplicatedProvider(state, [1, 1])
    with pytest.raises(TypeError):
        ReplicatedProvider({"n": 1})  # type: ignore[arg-type]


def test_replicas_of_arrays_that_do_not_change_are_described_once() -> None:
    state = {"w": torch.ones(3), "n": 1}
    provider = ReplicatedProvider(from_state_dict("s", state), [0, 3])
    first = provider.shards()
    assert [(s.key, s.replicas) for s in first] == [("w", (0, 3)), ("", ())]
    assert _layout(provider) is _layout(provider)
    assert first[0].source is state["w"]
    state["w"] = torch.ones(4)
    assert [(s.shape, s.replicas) for s in provider.shards()] == [((4,), (0, 3)), ((), ())]


# --- several splits of one dimension


def test_stretches_are_the_indices_that_torch_gives() -> None:
    rng = random.Random(1)
    several = 0
    for _ in range(300):
        size, ndim = rng.randrange(0, 40), rng.randrange(1, 4)
        shape = [rng.randrange(1, 5) for _ in range(ndim)]
        at = [rng.randrange(n) for n in shape]
        factors = [rng.choice([1, 2, 3]) for _ in range(ndim)]
        placements = [Shard(0) if f == 1 else _StridedShard(0, split_factor=f) for f in factors]
        held = dtensors.stretches(size, list(zip(shape, at, factors, strict=True)))
        expected = torch_utils._compute_local_shape_and_global_offset((size,), shape, at, placements)
        assert (sum(end - begin for begin, end in held),) == expected[0]
        if held:
            assert (held[0][0],) == expected[1]
        left = torch.arange(size)
        for n, i, factor in zip(shape, at, factors, strict=True):
            pieces = _chunks(left, factor)
            left = torch.cat([_chunks(piece, n)[i] for piece in pieces])
        assert [i for begin, end in held for i in range(begin, end)] == left.tolist()
        several += len(held) > 1
    assert several > 20


def _chunks(tensor: torch.Tensor, n: int) -> list[torch.Tensor]:
    chunks = list(torch.chunk(tensor, n))
    return chunks + [tensor[:0]] * (n - len(chunks))
