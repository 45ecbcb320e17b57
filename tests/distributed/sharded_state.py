"""DTensors of all kinds on several ranks, each case a function; run as ``sharded_state.py CASE …`` on each rank."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import datastates as ds
from datastates.errors import ProviderError
from datastates.planning import write
from datastates.providers import DTensorProvider, ReplicatedProvider, from_state_dict, from_stateful
from datastates.state import arrays
from datastates.state.shards import full_key

sys.path.insert(0, str(Path(__file__).parent))
from logical import check_tiles, restore

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from in_memory import Checkpoint, of_state_dict, whole


class Net(nn.Module):
    """Odd sizes, a buffer, a layer that no plan names, a frozen layer and an unused one."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(width, 7 * 2)
        self.down = nn.Linear(7 * 2, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, 3)
        self.unused = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.down(torch.relu(self.up(x)))))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, width: int = 5) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, width)).square().sum().backward()
    optimizer.step()


def check_states(optimizer: torch.optim.Optimizer, saved: Checkpoint) -> None:
    states = optimizer.state_dict()["state"]
    for key, tensor in saved.arrays.items():
        _, i, name = key.split("/")
        assert torch.equal(whole(states[int(i)][name]), tensor), key


def check_model_and_optimizer(make: Callable[[], nn.Module], width: int = 5) -> dict[str, list[tuple[int, ...]]]:
    """Check a sharded model: its parts tile the tensors, and a fresh copy that restores them trains on alike."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)
    train(model, optimizer, 1, width)
    provider, states = from_stateful("model", model), from_stateful("optim", optimizer)
    replicated = check_tiles(provider, {k: v for k, v in model.state_dict().items() if v.dtype == torch.float32})
    flat = {
        f"state/{i}/{name}": tensor
        for i, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }
    check_tiles(states, flat)
    named = get_optimizer_state_dict(model, optimizer)["state"]
    flat = {f"state/{key}/{name}": tensor for key, state in named.items() for name, tensor in state.items()}
    check_tiles(from_state_dict("o", lambda: get_optimizer_state_dict(model, optimizer)), flat)
    parameters = {k: p for k, p in model.named_parameters() if isinstance(p, DTensor)}
    if len(parameters) == len(list(model.parameters())):
        check_tiles(DTensorProvider("parameters", model), parameters)  # type: ignore[arg-type]
    lazy = {s.key: s.lazy for s in provider.shards() if not s.is_object}
    assert lazy == {k: k in dict(model.named_parameters()) for k in model.state_dict()}
    for one in (provider, states):
        layout = one.shards().layout  # type: ignore[attr-defined]
        assert one.shards().layout is layout  # type: ignore[attr-defined]

    named = get_optimizer_state_dict(model, optimizer)
    saved = [of_state_dict(state) for state in (model.state_dict(), optimizer.state_dict(), named)]
    train(model, optimizer, 2, width)
    expected = [{k: whole(v).clone() for k, v in model.state_dict().items()}]
    again = make()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    fresh = torch.optim.AdamW(again.parameters(), lr=0.3, fused=False)
    restore(from_stateful("model", again), saved[0])
    shards = restore(from_stateful("optim", fresh), saved[1])
    trained = list(again.parameters())
    for shard in shards:
        _, i, name = shard.key.split("/")
        assert isinstance(shard.source, DTensor) == (isinstance(trained[int(i)], DTensor) and name != "step"), shard
    train(again, fresh, 2, width)
    assert fresh.param_groups[0]["lr"] == 0.1
    expected.append({k: whole(v) for k, v in again.state_dict().items()})
    for key in expected[0]:
        assert torch.equal(expected[0][key], expected[1][key]), key

    # now in place, as states exist; by position and by name
    restore(from_stateful("optim", fresh), saved[1])
    check_states(fresh, saved[1])
    train(again, fresh, 4, width)
    restore(from_state_dict("optim", lambda: get_optimizer_state_dict(again, fresh)), saved[2])
    check_states(fresh, saved[1])
    return replicated


def fsdp() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def make() -> nn.Module:
        model = Net()
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    replicated = check_model_and_optimizer(make)
    assert set(replicated["up.weight"]) == {()}
    assert set(replicated["norm.running_mean"]) == {tuple(range(world))}


def hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicated = check_model_and_optimizer(lambda: fully_shard(Net(), mesh=mesh))
    assert replicated["up.weight"] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert set(replicated["norm.running_mean"]) == {(0, 1, 2, 3)}


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor_parallel() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    replicated = check_model_and_optimizer(lambda: parallelize_module(Net(), mesh, dict(PLAN)))
    assert set(replicated["up.weight"]) == {()}
    assert set(replicated["down.bias"]) == set(replicated["norm.weight"]) == {tuple(range(world))}


def as_saved() -> None:
    """Ranks that restore what they saved describe no array by an object, be it rows, columns or on all ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    models = [parallelize_module(Net(), mesh, dict(PLAN)), fully_shard(Net(), mesh=mesh)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=False) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 1)
    providers = [from_stateful(f"m{i}", model) for i, model in enumerate(models)]
    providers += [from_stateful(f"o{i}", optimizer) for i, optimizer in enumerate(optimizers)]
    kept = [whole(tensor).clone() for model in models for tensor in model.state_dict().values()]
    path = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(path)
    ds.snapshot(providers, Path(path[0], "c"), host_cache="64MiB").wait_committed()
    for model in models:
        for tensor in model.state_dict().values():
            tensor.zero_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "destination", None)  # makes an object
        restored = ds.restore(providers, Path(path[0], "c"), host_cache="64MiB")
    assert not restored.missing_keys
    for model in models:
        for tensor in model.state_dict().values():
            assert torch.equal(whole(tensor), kept.pop(0))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])


def two_dimensional() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make() -> nn.Module:
        model = parallelize_module(Net(6), mesh["tp"], dict(PLAN))
        return fully_shard(model, mesh=mesh["dp"])

    model = make()
    assert any(isinstance(p, _StridedShard) for p in model.up.weight.placements)  # type: ignore[attr-defined]
    replicated = check_model_and_optimizer(make, 6)
    assert set(replicated["up.weight"]) == set(replicated["down.weight"]) == {()}
    # not in the plan: each column of the mesh has a DTensor of its own, and the columns are alike
    assert model.norm.weight.device_mesh.size() == 2  # type: ignore[attr-defined]
    assert replicated["norm.weight"] == replicated["down.bias"] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def _placements(mesh: DeviceMesh, ndim: int) -> Iterable[list[Any]]:
    choices = [Replicate(), *(Shard(d) for d in range(ndim))]

    def choose(n: int) -> Iterable[list[Any]]:
        if n == 0:
            yield []
            return
        for rest in choose(n - 1):
            for choice in choices:
                yield [*rest, choice]

    return choose(mesh.ndim)


def any_placement() -> None:
    """Uneven, empty and replicated parts on meshes of one and two dimensions, one of them with transposed ranks."""
    world = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (world,))]
    if world == 4:
        meshes += [init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [[0, 2], [1, 3]])]
    for mesh in meshes:
        tensors = {}
        for shape in [(), (1,), (5,), (0, 3), (3, 2), (7, 5), (4, 3, 2)]:
            logical = torch.arange(float(np.prod(shape))).reshape(shape)
            for placements in _placements(mesh, len(shape)):
                tensors[f"{shape} {placements}"] = distribute_tensor(logical, mesh, placements)
        check_tiles(DTensorProvider("all", tensors), tensors)  # type: ignore[arg-type]
        transposed = {k: t.t() for k, t in tensors.items() if t.ndim == 2}
        check_tiles(DTensorProvider("t", transposed), transposed)  # type: ignore[arg-type]
    tensor = distribute_tensor(torch.randn(6, 6), meshes[0], [Shard(0)])
    waiting = {"r": tensor.redistribute(placements=[Replicate()], async_op=True)}
    check_tiles(DTensorProvider("w", waiting), waiting)  # type: ignore[arg-type]


def outside() -> None:
    """Ranks that are not in a mesh hold an empty part of its tensors."""
    some = DeviceMesh("cpu", [0, 1])
    tensors = {
        "sharded": distribute_tensor(torch.arange(6.0).reshape(3, 2), some, [Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(3.0), some, [Replicate()]),
    }
    shards = {s.key: s for s in DTensorProvider("d", tensors).shards()}
    if dist.get_rank() < 2:
        assert shards["scalar"].replicas == (0, 1)
        assert shards["sharded"].replicas == ()
    else:
        for key, shape in {"sharded": (3, 2), "scalar": ()}.items():
            assert (shards[key].global_shape, shards[key].offset) == (shape, None)
            assert (shards[key].shape, shards[key].flat, shards[key].replicas) == ((0,), (0, 0), ())


def refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    uneven = DTensor.from_local(torch.ones(1 + 2 * dist.get_rank()), mesh, [Shard(0)], shape=(4,), stride=(1,))
    reversed_ = distribute_tensor(torch.arange(8.0), DeviceMesh("cpu", [1, 0]), [Shard(0)])
    strided = distribute_tensor(torch.arange(8.0), mesh, [_StridedShard(0, split_factor=2)])
    for tensor, words in [
        (partial, ["'x/w'", repr(Partial()), "'dp'", "redistribute"]),
        (uneven, ["'x/w'", f"({1 + 2 * dist.get_rank()},)", "(2,)", "shape="]),
        (reversed_, ["'x/w'", "ascend"]),
        (strided, ["'x/w'", "several pieces", "redistribute"]),
    ]:
        provider = from_state_dict("s", {"x": {"w": tensor}})
        with pytest.raises(ProviderError) as caught:
            provider.shards()
        assert all(word in str(caught.value) for word in words), caught.value
        with pytest.raises(ProviderError):
            arrays.destination("x/w", tensor)
    whole_again = {"w": strided.redistribute(placements=[Shard(0)])}
    check_tiles(DTensorProvider("d", whole_again), whole_again)  # type: ignore[arg-type]


def data_parallel() -> None:
    world = dist.get_world_size()
    model = Net()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    provider = from_stateful("model", wrapped)
    bare = {s.key for s in from_stateful("model", model).shards()}
    first = provider.shards()
    assert {s.key for s in first} == bare
    assert all(s.replicas == (() if s.is_object else tuple(range(world))) for s in first)
    assert provider.shards().layout is first.layout  # type: ignore[attr-defined]
    check_tiles(provider, {k: v for k, v in model.state_dict().items() if v.dtype == torch.float32})
    saved = of_state_dict(model.state_dict())
    other = Net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    restore(from_stateful("model", nn.parallel.DistributedDataParallel(other)), saved)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))

    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(other, ["up.weight"])
    ignoring = from_stateful("model", nn.parallel.DistributedDataParallel(other))
    assert {s.key for s in ignoring.shards() if not s.replicas and not s.is_object} == {"up.weight"}

    optimizer = torch.optim.AdamW(wrapped.parameters())
    train(wrapped, optimizer, dist.get_rank())
    states = ReplicatedProvider(from_stateful("optim", optimizer))
    assert {s.replicas for s in states.shards() if not s.is_object} == {tuple(range(world))}
    check_tiles(states, {f"state/0/{n}": t for n, t in optimizer.state_dict()["state"][0].items()})
    alone = ReplicatedProvider(from_stateful("optim", optimizer), ranks=[dist.get_rank()])
    assert {s.replicas for s in alone.shards()} == {()}
    elsewhere = ReplicatedProvider(from_stateful("optim", optimizer), ranks=[world, world + 1])
    with pytest.raises(ProviderError, match=f"rank {dist.get_rank()} is none"):
        elsewhere.shards()
    mesh = init_device_mesh("cpu", (world,))
    part = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    with pytest.raises(ProviderError, match="'w' is a part"):
        ReplicatedProvider(from_state_dict("s", part)).shards()
    alike = {"w": distribute_tensor(torch.ones(4), mesh, [Replicate()])}
    with pytest.raises(ProviderError, match="by itself"):
        ReplicatedProvider(from_state_dict("s", alike), ranks=[dist.get_rank(), world]).shards()
    assert ReplicatedProvider(from_state_dict("s", alike)).shards()[0].replicas == tuple(range(world))


def writers() -> None:
    """All ranks choose the same writers for the parts that they describe."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Net(), mesh=mesh)
    shards = [s for s in from_stateful("model", model).shards() if s.replicas]
    parts = [(full_key("model", s.key), s.nbytes or 0, s.replicas) for s in shards]
    decided = {(key, alike): rank for (key, _, alike), rank in zip(parts, write.owners(parts), strict=True)}
    written = sum(nbytes for key, nbytes, alike in parts if decided[key, alike] == dist.get_rank())
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, (decided, written))
    together = {**found[0][0], **found[1][0]}
    assert all(rank in alike for (_, alike), rank in together.items())
    assert all(together[part] == rank for decided, _ in found for part, rank in decided.items())
    assert all(written for _, written in found), found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in sys.argv[1:]:
        globals()[case]()
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # leftover threads of torch sometimes abort a process that ends normally
