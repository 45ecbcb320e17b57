"""Buffers that differ between the ranks are refused, or saved as rank 0 has them where that is right for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HEAD = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
import datastates as ds
from datastates.providers import ReplicatedProvider, from_state_dict, from_stateful

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
random = torch.Generator().manual_seed(100 + rank)

def net():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    return nn.Sequential(*layers)

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=random)).square().mean().backward()
        optimizer.step()

def refused(name, provider, *keys):
    # as torch.save of rank 0 alone would lose what other ranks hold
    try:
        ds.snapshot([provider], f"{folder}/refused-{name}", step=1).wait_committed()
    except ds.errors.CommitError as error:
        text = str(error)
    assert "differs between ranks 0 and 1" in text and "only rank 0" in text, text
    assert any(f"'model/{key}'" in text for key in keys), text
    assert "per_rank = True" in text and "compare=False" in text, text
    dist.barrier()
    assert not os.path.exists(f"{folder}/refused-{name}"), name

def check(name, provider, stock, writers=None):
    path = f"{folder}/{name}"
    if rank == 0:
        torch.save(stock, f"{folder}/stock.pt")
    ds.snapshot([provider], path, step=1).wait_committed()
    wanted, saved = torch.load(f"{folder}/stock.pt"), ds.load(path)["model"]
    assert list(saved) == list(wanted), name
    for key in wanted:
        assert torch.equal(saved[key], wanted[key]), (name, key)
    everybody = range(dist.get_world_size())
    owners = {r for r in everybody if sum(map(torch.numel, map(torch.as_tensor, torch.load(
        f"{path}/rank-{r:05}.pt")["model"].values())))}
    # parameters that must be equal are shared out
    assert owners == (writers or set(everybody)), name
    ds.restore([provider], path)
    dist.barrier()

def end():
    dist.barrier()
    dist.destroy_process_group()
"""

SCRIPT = (
    HEAD
    + """
for broadcasts in (True, False):
    model = DDP(net(), broadcast_buffers=broadcasts)
    train(model)
    means = [torch.zeros(8) for _ in range(2)]
    dist.all_gather(means, model.module[1].running_mean)
    assert not torch.equal(*means)
    statistics = [f"{i}.running_{what}" for i in (1, 3, 5, 7) for what in ("mean", "var")]
    if broadcasts:
        check(f"ddp{broadcasts}", from_stateful("model", model), model.module.state_dict())
    else:
        refused(f"ddp{broadcasts}", from_stateful("model", model), *statistics)
    train(model)
    alone = from_stateful("model", model.module)
    refused(f"replicated{broadcasts}", ReplicatedProvider(alone), *statistics)
    check(f"lowest{broadcasts}", ReplicatedProvider(alone, compare=False), model.module.state_dict(), {0})

model = net()
model.register_parameter("apart", nn.Parameter(torch.full((5,), float(rank))))  # nothing keeps it the same
model.register_parameter("own", nn.Parameter(torch.full((7,), float(rank))))
fully_shard(model, ignored_params={model.apart, model.own})
train(model)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
refused("fsdp", from_stateful("model", model), "apart", "own", *statistics)
lowest = ReplicatedProvider(from_stateful("model", model), compare=False)
check("fsdp", lowest, get_model_state_dict(model, options=options))
end()
"""
)

OTHERS = (
    HEAD
    + """
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh

options = StateDictOptions(full_state_dict=True, cpu_offload=True)
hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
world = init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",))

def differ(model):
    # as the data of each rank would change them
    for buffer in model.buffers():
        buffer.add_(rank + 1)

for name, make in (
    ("hybrid", lambda: fully_shard(net(), mesh=hybrid)),
    ("replicate", lambda: replicate_with_fsdp(net(), mesh=world)),
    # a DistributedDataParallel takes SyncBatchNorm on GPUs only
    ("synced", lambda: fully_shard(nn.SyncBatchNorm.convert_sync_batchnorm(net()))),
):
    model = make()
    check(f"{name}-equal", from_stateful("model", model), get_model_state_dict(model, options=options))
    differ(model)
    keys = [key for key, _ in model.named_buffers()]
    refused(name, from_stateful("model", model), *keys)
    lowest = ReplicatedProvider(from_stateful("model", model), compare=False)
    writers = {"hybrid": {0, 1}, "replicate": {0}, "synced": {0, 1, 2, 3}}[name]
    check(name, lowest, get_model_state_dict(model, options=options), writers)

composable = replicate(net())
train(composable)
lowest = ReplicatedProvider(from_stateful("model", composable), compare=False)
check("composable", lowest, composable.state_dict(), {0})

# two stages, each of which two ranks hold
groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
stage = DDP(net(), process_group=groups[rank % 2])
train(stage)
sharded = fully_shard(net(), mesh=hybrid["replicate"])  # ranks 0 and 2, or 1 and 3
for buffer in sharded.buffers():
    buffer.add_(rank % 2)
path = f"{folder}/stages"
states = {f"stage{rank % 2}": stage, f"sharded{rank % 2}": sharded}
ds.snapshot([from_stateful(name, model) for name, model in states.items()], path, step=1).wait_committed()
saved = ds.load(path)
for name, model in states.items():
    for key, mine in model.named_buffers():
        stock = [None] * 4
        dist.all_gather_object(stock, mine)
        assert torch.equal(saved[name][key.removeprefix("module.")], stock[rank % 2]), (name, key)
end()
"""
)


@pytest.mark.long
def test_different_buffers_are_refused_or_those_of_rank_0(ranks: Any, tmp_path: Path) -> None:
    ranks(2, SCRIPT, tmp_path, timeout=120)


@pytest.mark.by_hand
def test_hybrid_and_replicated_and_synced_modules_and_stages(ranks: Any, tmp_path: Path) -> None:
    ranks(4, OTHERS, tmp_path, timeout=300)
