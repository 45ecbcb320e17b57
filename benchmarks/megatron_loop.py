"""Measure what a checkpoint costs a Megatron-Core loop with this package's strategies and with Megatron's own.

Run it by ``torchrun --nproc-per-node N benchmarks/megatron_loop.py DIRECTORY``, with a GPU for each rank or with none.
All systems run one after another in the same processes, round after round. Rank 0 prints a table; with ``--json`` it
writes the samples.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

import page_cache
from datastates.adapters.megatron import DataStatesLoadStrategy, DataStatesSaveStrategy
from gpt import Gpt

SYSTEMS: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {
    "datastates": (
        lambda nbytes: DataStatesSaveStrategy(host_cache=nbytes),
        DataStatesLoadStrategy,
    ),
    "Megatron": (lambda _: TorchDistSaveShardedStrategy("torch_dist", 1), TorchDistLoadShardedStrategy),
}
"""For each system, how to make its save strategy, given the bytes of this rank's state, and its load strategy."""
WARM_UP = 3


class Loop:
    """A GPT on each rank, trained by fused AdamW.

    The ranks' tensors are slices of sharded tensors along an additional first axis, as those of pipeline stages are.
    """

    def __init__(self, size: argparse.Namespace) -> None:
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        torch.manual_seed(dist.get_rank())
        self._model = Gpt(width=size.width, layers=size.layers, heads=max(1, size.width // 64)).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._tokens = torch.randint(Gpt.VOCABULARY, (size.batch, size.context), device=device)
        self.iterate(1, lambda: None)  # creates the optimizer's moments

    def state(self) -> dict[str, Any]:
        """The whole state as sharded tensors."""
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def sharded(key: str, tensor: torch.Tensor) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(key, tensor, (0, rank, ranks), prepend_axis_num=1)

        state = {}
        for name, parameter in self._model.named_parameters():
            state[name] = sharded(f"model.{name}", parameter.detach())
            for moment in ("exp_avg", "exp_avg_sq"):
                key = f"optimizer.{moment}.{name}"
                state[key] = sharded(key, self._optimizer.state[parameter][moment])
        return state

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's state."""
        return 3 * sum(parameter.nbytes for parameter in self._model.parameters())

    def iterate(self, count: int, between: Callable[[], None]) -> None:
        """Train for ``count`` iterations, and call ``between`` after each."""
        for _ in range(count):
            logits = self._model(self._tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), self._tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
            between()


def synchronize() -> None:
    """Wait for this device, then for the other ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def measure(loop: Loop, directory: Path, saver: Any, loader: Any, period: int) -> dict[str, float]:
    """Save one checkpoint and load it cold, then save another while training goes on; times in seconds."""
    sample, queue = {}, AsyncCallsQueue()
    path = _made(directory / "at-once")
    synchronize()
    begin = time.perf_counter()
    dist_checkpointing.save(loop.state(), str(path), saver)
    _sync_tree(path)
    synchronize()
    sample["save"] = time.perf_counter() - begin
    if dist.get_rank() == 0:
        page_cache.drop(path)
    synchronize()
    begin = time.perf_counter()
    dist_checkpointing.load(loop.state(), str(path), loader)
    synchronize()
    sample["load"] = time.perf_counter() - begin

    loop.iterate(WARM_UP, lambda: None)
    synchronize()
    begin = time.perf_counter()
    loop.iterate(period, lambda: None)
    synchronize()
    plain = time.perf_counter() - begin
    path = _made(directory / "meanwhile")
    begin = time.perf_counter()
    queue.schedule_async_request(dist_checkpointing.save(loop.state(), str(path), saver, async_sharded_save=True))
    sample["call"] = time.perf_counter() - begin
    loop.iterate(period, lambda: queue.maybe_finalize_async_calls(blocking=False))
    synchronize()
    sample["lost"] = time.perf_counter() - begin - plain
    queue.maybe_finalize_async_calls(blocking=True)
    synchronize()
    queue.close()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dist.barrier()
    return sample


def _made(path: Path) -> Path:
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    return path


def _sync_tree(path: Path) -> None:
    """Sync the files, as Megatron leaves them in the page cache. The measured time includes this."""
    dist.barrier()
    if dist.get_rank() == 0:
        for one in (*path.iterdir(), path):
            descriptor = os.open(one, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _without_cuda() -> None:
    """Let Megatron's save run on a CPU, though it asks for the current device and synchronizes it."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    cuda.set_device = lambda *_: None
    cuda.device_count = lambda: 1


def main(arguments: Sequence[str]) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoints go")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--period", type=int, default=30, help="iterations of one measurement of the loop")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=500, help="no further round is begun after these")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        _without_cuda()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    begin, loop = time.monotonic(), Loop(chosen)
    systems = {name: (saver(loop.nbytes + (64 << 20)), loader()) for name, (saver, loader) in SYSTEMS.items()}
    found: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "nbytes": loop.nbytes * dist.get_world_size(),
        "samples": {name: [] for name in systems},
    }
    for number in range(chosen.rounds):
        late = torch.tensor([float(time.monotonic() - begin > chosen.seconds)])
        dist.broadcast(late, 0)
        if number and late.item():
            break
        for name, (saver, loader) in systems.items():
            folder = chosen.directory / f"{name}-{number}"
            sample = measure(loop, folder, saver, loader, chosen.period)
            found["samples"][name].append(sample)
            if dist.get_rank() == 0:
                print(f"{name:12}", _in_words(sample), flush=True)
    if dist.get_rank() == 0:
        _print(found)
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # do not wait for leftovers of Megatron's workers


def _print(found: dict[str, Any]) -> None:
    print(f"{found['ranks']} ranks, {found['nbytes'] / 1e9:.2f} GB; medians, seconds")
    for name, samples in found["samples"].items():
        medians = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
        print(f"{name:12}", _in_words(medians), f"({len(samples)})")


def _in_words(sample: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.3f}" for key, value in sample.items())


if __name__ == "__main__":
    main(sys.argv[1:])
