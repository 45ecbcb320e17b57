"""Buffers that differ between the ranks are saved as rank 0 has them, as ``torch.save`` on rank 0 saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = """
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

def check(name, provider, stock):
    path = f"{folder}/{name}"
    if rank == 0:
        torch.save(stock, f"{folder}/stock.pt")
    ds.snapshot([provider], path, step=1).wait_committed()
    wanted, saved = torch.load(f"{folder}/stock.pt"), ds.load(path)["model"]
    assert list(saved) == list(wanted), name
    for key in wanted:
        assert torch.equal(saved[key], wanted[key]), (name, key)
    owners = {r for r in range(2) if sum(map(torch.numel, map(torch.as_tensor, torch.load(
        f"{path}/rank-{r:05}.pt")["model"].values())))}
    assert owners == {0, 1}, name  # the parameters are still shared out
    ds.restore([provider], path)
    dist.barrier()

for broadcasts in (True, False):
    model = DDP(net(), broadcast_buffers=broadcasts)
    train(model)
    means = [torch.zeros(8) for _ in range(2)]
    dist.all_gather(means, model.module[1].running_mean)
    assert not torch.equal(*means)
    check(f"ddp{broadcasts}", from_stateful("model", model), model.module.state_dict())
    train(model)
    alone = from_stateful("model", model.module)
    check(f"replicated{broadcasts}", ReplicatedProvider(alone), model.module.state_dict())

model = net()
model.register_parameter("apart", nn.Parameter(torch.full((5,), float(rank))))  # nothing keeps it the same
model.register_parameter("own", nn.Parameter(torch.full((7,), float(rank))))
fully_shard(model, ignored_params={model.apart, model.own})
train(model)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
check("fsdp", from_stateful("model", model), get_model_state_dict(model, options=options))
dist.destroy_process_group()
"""


def test_buffers_are_those_of_rank_0(ranks: Any, tmp_path: Path) -> None:
    ranks(2, SCRIPT, tmp_path, timeout=120)
