"""What the ranks of the tests train. Each script begins by importing all of this."""

# ruff: noqa: F401 the scripts use all of this

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from datastates import _native
from datastates._base import faults
from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStorageReader, DataStatesStorageWriter
from states import SMALL, loaded, problems, same

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from in_ranks import arm, end, fault, rank, say

TOKENS = 48


class Net(nn.Module):
    """Odd sizes, a buffer that every forward pass changes, a frozen layer, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 33)
        self.up = nn.Linear(33, 701)
        self.norm = nn.BatchNorm1d(33)
        self.down = nn.Linear(701, 33)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.head = nn.Linear(33, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        return self.head(self.frozen(x + self.scale * self.down(torch.relu(self.up(x)))))  # type: ignore[no-any-return]


def begin() -> None:
    """Join the other ranks."""
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model sharded over all ranks, and its optimizer."""
    torch.manual_seed(seed)
    net = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net.up, net.down):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Train on the same batches on all ranks, so that the losses are the same for any number of ranks; returns them."""
    losses = []
    for number in range(first, last):
        tokens = torch.randint(0, TOKENS, (16,), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(tokens), tokens.roll(1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach().double().item())
    return losses


def state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim, "note": {"rank 0": True}}


def save(how: str, path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As ``states.save_with`` does."""
    content = state(net, optimizer)
    if how == "stock":
        dcp.save(content, checkpoint_id=path)
        return
    writer = DataStatesStorageWriter(**SMALL)
    if how == "ours":
        dcp.save(content, checkpoint_id=path, storage_writer=writer)
    elif how == "thread":
        group = dist.new_group(backend="gloo")
        dcp.async_save(content, checkpoint_id=path, storage_writer=writer, process_group=group).result()
    else:
        ours.async_save(content, path, storage_writer=writer).wait_committed()
    closer = threading.Thread(target=writer.close)
    closer.start()
    closer.join()
    dist.barrier()


def load(how: str, path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    content = state(net, optimizer)
    reader = DataStatesStorageReader(path) if how == "ours" else dcp.FileSystemReader(path)
    dcp.load(content, storage_reader=reader)
    set_state_dict(net, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"])
    return reader


def whole(content: Any) -> Any:
    """A copy of a state with whole logical tensors in place of this rank's parts."""
    if isinstance(content, DTensor):
        content = content.full_tensor()
    if isinstance(content, torch.Tensor):
        return content.detach().clone()
    if isinstance(content, dict):
        return {key: whole(value) for key, value in content.items()}
    return content
