"""Megatron-Core on GPUs, over NCCL: saved while training goes on, and loaded by either strategy on 1 or 2 ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

gpus = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed: its tests did NOT run"
)

SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from datastates.adapters.megatron import DataStatesLoadStrategy, DataStatesSaveStrategy

def main():
    root = Path(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=size)
    generator = torch.Generator().manual_seed(3)
    whole = {f"w{n}": torch.randn(2048, 1024, generator=generator) for n in range(8)}
    whole["bias"] = torch.randn(32, generator=generator)

    def part(tensor):
        return tensor.chunk(size)[rank].cuda()

    parameters = {name: torch.nn.Parameter(part(tensor)) for name, tensor in whole.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, fused=True)

    def step():
        sum((p * p).sum() for p in parameters.values()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # which makes the moments

    def sharded(tensors):
        return {name: ShardedTensor.from_rank_offsets(name, t, (0, rank, size)) for name, t in tensors.items()}

    def state():
        moments = {f"exp_avg.{n}": optimizer.state[p]["exp_avg"] for n, p in parameters.items()}
        return {n: p.detach() for n, p in parameters.items()} | moments

    def made(path):
        if rank == 0:
            path.mkdir()
        dist.barrier()
        return path

    strategy = DataStatesSaveStrategy(host_cache="64MiB", block="4MiB")
    for action in sys.argv[2:]:
        if action == "save":
            queue = AsyncCallsQueue(persistent=False)
            for way in ("at-once", "meanwhile"):
                step()
                path = made(root / f"{way}-{size}")
                expected = {name: t.clone() for name, t in state().items()}
                if way == "at-once":
                    dist_checkpointing.save(sharded(state()), str(path), strategy)
                else:
                    queue.schedule_async_request(
                        dist_checkpointing.save(sharded(state()), str(path), strategy, async_sharded_save=True)
                    )
                    for _ in range(3):
                        step()
                    queue.maybe_finalize_async_calls(blocking=True)
                torch.save({n: t.cpu() for n, t in expected.items()}, root / f"{way}-{size}.expected-{rank}")
            queue.close()
        else:
            saved = int(action.partition(":")[2])
            for way in ("at-once", "meanwhile"):
                parts = [torch.load(root / f"{way}-{saved}.expected-{r}") for r in range(saved)]
                for reading in (DataStatesLoadStrategy(), TorchDistLoadShardedStrategy()):
                    live = sharded({name: torch.zeros_like(t) for name, t in state().items()})
                    found = dist_checkpointing.load(live, str(root / f"{way}-{saved}"), reading)
                    for name, tensor in found.items():
                        expected = part(torch.cat([p[name] for p in parts]))
                        assert tensor.is_cuda, name
                        assert torch.equal(tensor, expected), (way, name, type(reading).__name__)
        dist.barrier()
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # Megatron's workers are not waited for

if __name__ == "__main__":
    main()
"""


def test_one_gpu(ranks: Any, tmp_path: Path) -> None:
    ranks(1, SCRIPT, tmp_path, "save", "load:1", timeout=150)


@pytest.mark.skipif(gpus < 2, reason=f"needs 2 GPUs, {gpus} here: did NOT run")
def test_two_gpus_and_other_numbers(ranks: Any, tmp_path: Path) -> None:
    ranks(2, SCRIPT, tmp_path, "save", "load:2", timeout=150)
    ranks(1, SCRIPT, tmp_path, "load:2", "save", timeout=150)
    ranks(2, SCRIPT, tmp_path, "load:1", timeout=150)
