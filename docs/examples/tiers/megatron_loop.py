"""Megatron-Core, whose checkpoints go on to a bucket: ``torchrun megatron_loop.py DIRECTORY s3://bucket/run STEPS``.

A script of Megatron's says ``install(tiers="s3://bucket/run")`` instead. On a fresh disk, ``datastates fetch
s3://bucket/run DIRECTORY`` comes first. It also writes ``latest_checkpointed_iteration.txt``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from datastates.adapters.megatron import DataStatesLoadStrategy, DataStatesSaveStrategy

directory, bucket, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tracker = directory / "latest_checkpointed_iteration.txt"
dist.init_process_group("gloo")
torch.manual_seed(1)
weight = torch.nn.Parameter(torch.randn(256, 256))
optimizer = torch.optim.SGD([weight], lr=0.01)


def sharded_state(iteration: int) -> dict:
    """This rank's rows of a matrix, as tensor parallelism has them."""
    part = (0, dist.get_rank(), dist.get_world_size())
    return {"weight": ShardedTensor.from_rank_offsets("weight", weight.detach(), part), "iteration": iteration}


strategy, step = DataStatesSaveStrategy(tiers=bucket), 0
if tracker.exists():
    folder = directory / f"iter_{int(tracker.read_text()):07d}"
    step = dist_checkpointing.load(sharded_state(0), str(folder), DataStatesLoadStrategy())["iteration"]
while step < steps:
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 2 == 0:
        (folder := directory / f"iter_{step:07d}").mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(sharded_state(step), str(folder), strategy)
        tracker.write_text(str(step))
strategy.close()
print("sum of the weights:", weight.double().sum().item())
dist.destroy_process_group()
