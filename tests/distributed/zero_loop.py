"""One rank of two training loops with ZeRO, which write to files what their providers describe.

Arguments: a folder to write to, and, to go on from there, a folder that other ranks have written to.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from datastates.providers import FlatLayout, Partition, ShardedZeroProvider

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import in_memory

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 1))


def zero_redundancy(net: torch.nn.Module) -> tuple[Any, ShardedZeroProvider]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    parameters = list(net.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.2}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.05)
    return optimizer, ShardedZeroProvider.from_zero_redundancy("optim", optimizer, net.named_parameters())


class HandRolled:
    """ZeRO-1: a flat master copy of this rank's partition, stepped by AdamW, gathered after each step."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.parameters = list(net.parameters())
        named = [(name, tuple(p.shape)) for name, p in net.named_parameters()]
        self.layout = FlatLayout.concatenated(named, RANK, WORLD, alignment=4)
        self.master = torch.nn.Parameter(self.partition([p.detach() for p in self.parameters]))
        self.optimizer = torch.optim.AdamW([self.master], lr=0.05)

    def partition(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([t.reshape(-1) for t in tensors])
        padded = torch.zeros(self.layout.numel * WORLD)
        padded[: len(flat)] = flat
        return padded[RANK * self.layout.numel : (RANK + 1) * self.layout.numel].clone()

    def step(self) -> None:
        self.master.grad = self.partition([p.grad for p in self.parameters if p.grad is not None])
        self.optimizer.step()
        self.gather()

    def gather(self) -> None:
        parts = [torch.empty(self.layout.numel) for _ in range(WORLD)]
        dist.all_gather(parts, self.master.detach())
        flat = torch.cat(parts)
        for parameter in self.parameters:
            parameter.data.copy_(flat[: parameter.numel()].view(parameter.shape))
            flat = flat[parameter.numel() :]

    def provider(self) -> ShardedZeroProvider:
        share = Partition(self.layout, {"fp32": self.master}, parameter=self.master)
        return ShardedZeroProvider("optim", [share], optimizer=self.optimizer)


def train(net: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        net.zero_grad()
        net(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()


def build(mode: str) -> tuple[torch.nn.Module, Any, ShardedZeroProvider]:
    net = model()
    if mode == "zero_redundancy":
        return net, *zero_redundancy(net)
    hand_rolled = HandRolled(net)
    return net, hand_rolled, hand_rolled.provider()


def write(folder: Path, net: torch.nn.Module, provider: ShardedZeroProvider, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**in_memory.describe(provider), "model": net.state_dict(), **more}, folder / f"rank-{RANK}")


def begin(mode: str, to: Path) -> None:
    net, optimizer, provider = build(mode)
    train(net, optimizer, range(3))
    consolidated = None
    if mode == "zero_redundancy":
        optimizer.consolidate_state_dict()
        consolidated = optimizer.state_dict() if RANK == 0 else None
    write(to / mode / "begun", net, provider, consolidated=consolidated)


def go_on(mode: str, to: Path, source: Path) -> None:
    net, optimizer, provider = build(mode)
    ranks = [torch.load(path, weights_only=False) for path in sorted((source / mode / "begun").glob("rank-*"))]
    checkpoint = in_memory.Checkpoint()
    for rank in ranks:
        checkpoint.add(rank)
    saved = checkpoint.restore(provider, RANK)
    assert saved.differences == [], saved.differences
    if mode == "zero_redundancy":
        net.load_state_dict(ranks[0]["model"])
    else:
        optimizer.gather()
    write(to / mode / "restored", net, provider)
    train(net, optimizer, range(3, 5))
    write(to / mode / "gone_on", net, provider)
    net, optimizer, provider = build(mode)
    train(net, optimizer, range(5))
    write(to / mode / "unbroken", net, provider)


dist.init_process_group("gloo")
for mode in ("zero_redundancy", "hand_rolled"):
    if len(sys.argv) == 2:
        begin(mode, Path(sys.argv[1]))
    else:
        go_on(mode, Path(sys.argv[1]), Path(sys.argv[2]))
dist.destroy_process_group()
os._exit(0)  # leftover threads of torch sometimes abort a process that ends normally
