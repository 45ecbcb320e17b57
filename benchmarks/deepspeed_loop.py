"""Measure what a checkpoint costs a DeepSpeed loop with this package's engine and with DeepSpeed's own.

Run it by ``torchrun --nproc-per-node GPUS benchmarks/deepspeed_loop.py``, on one GPU or several. All engines run one
after another in the same processes, round after round. Rank 0 prints a table; with ``--json`` it writes the samples.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from gpt import Gpt

# DeepSpeed's decoupled writer writes from another process; it needs libaio
ENTRIES: dict[str, dict[str, Any]] = {
    "datastates": {"datastates_ckpt": {"host_cache_size": 8}},
    "torch": {},
    "fast, decoupled": {
        "checkpoint": {
            # without a parallel unit, data-parallel ranks fail in DeepSpeed 0.19.8
            "writer": {"type": "fast", "decoupled": True, "io_buffer_size": 1 << 30, "data_parallel": "replica"}
        }
    },
}
WARM_UP = 3


class Loop:
    """A GPT that trains in bfloat16, with one checkpoint engine."""

    def __init__(self, entry: dict[str, Any], stage: int, size: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = Gpt(width=size.width, layers=size.layers, heads=max(1, size.width // 64))
        config = {
            "train_micro_batch_size_per_gpu": size.batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            **entry,
        }
        fused = torch.cuda.is_available()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.parameters = sum(p.numel() if not hasattr(p, "ds_numel") else p.ds_numel for p in model.parameters())
        self.tokens = torch.randint(Gpt.VOCABULARY, (size.batch, size.context), device=self.engine.device)

    def iterate(self, count: int) -> None:
        for _ in range(count):
            logits = self.engine(self.tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten())
            self.engine.backward(loss)
            self.engine.step()

    def finish(self) -> None:
        """Wait until the last checkpoint is durable."""
        own = self.engine.checkpoint_engine
        if hasattr(own, "ckpt_engine") and own.ckpt_engine is not None and hasattr(own.ckpt_engine, "saves"):
            own.ckpt_engine.wait()
        elif own.is_decoupled():
            self.engine._commit_decoupled_checkpoint()
        synchronize()


def synchronize() -> None:
    """Wait for this device, then for the other ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def measure(loop: Loop, directory: Path, period: int, checkpoints: int) -> list[dict[str, float]]:
    """Time periods without a checkpoint, each followed by a period that begins with one; in seconds."""
    loop.iterate(WARM_UP)
    loop.engine.save_checkpoint(str(directory), tag="warm-up")
    loop.iterate(1)
    loop.finish()
    samples = []
    for number in range(checkpoints):
        synchronize()
        begin = time.perf_counter()
        loop.iterate(period)
        synchronize()
        plain = time.perf_counter() - begin
        begin = time.perf_counter()
        loop.engine.save_checkpoint(str(directory), tag=f"checkpoint-{number}")
        call = time.perf_counter() - begin
        loop.iterate(period)
        synchronize()
        seconds = time.perf_counter() - begin
        loop.finish()
        durable = time.perf_counter() - begin
        samples.append({"plain": plain, "call": call, "lost": seconds - plain, "period_and_durable": durable})
        if dist.get_rank() == 0:
            shutil.rmtree(directory / f"checkpoint-{number}")
        dist.barrier()
    return samples


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoints go")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--engines", nargs="+", default=list(ENTRIES), choices=list(ENTRIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoints", type=int, default=2, help="a round and engine")
    parser.add_argument("--period", type=int, default=30, help="iterations from one checkpoint to the next")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=500, help="no further round is begun after these")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("CROSS_SIZE", "1")  # DeepSpeed's own launcher sets these, and its fast writer reads them
    os.environ.setdefault("CROSS_RANK", "0")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    begin = time.monotonic()
    loop: Loop | None = None
    found: dict[str, Any] = {"ranks": dist.get_world_size(), "parameters": 0, "samples": {}, "errors": {}}
    for number in range(chosen.rounds):
        late = torch.tensor([time.monotonic() - begin > chosen.seconds], dtype=torch.int32)
        if torch.cuda.is_available():
            late = late.cuda()
        dist.broadcast(late, 0)
        if number and late.item():
            break
        for stage in chosen.stages:
            for engine in chosen.engines:
                name = f"ZeRO-{stage}, {engine}"
                if name in found["errors"]:
                    continue
                folder = chosen.directory / name.replace(", ", "-").replace(" ", "")
                try:
                    loop = Loop(ENTRIES[engine], stage, chosen)
                    found["parameters"] = loop.parameters
                    found["samples"].setdefault(name, []).extend(
                        measure(loop, folder, chosen.period, chosen.checkpoints)
                    )
                    loop.engine.destroy()
                except Exception as error:  # the table shows it; it fails on all ranks alike
                    found["errors"][name] = f"{type(error).__name__}: {error}"[:500]
                loop = None
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                    print(name, json.dumps(found["samples"].get(name, [])[-chosen.checkpoints :]), flush=True)
    if dist.get_rank() == 0:
        _print(found)
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)  # a worker that failed to start would keep the interpreter from ending


def _print(found: dict[str, Any]) -> None:
    print(f"{found['ranks']} ranks, {found['parameters'] / 1e6:.0f} M parameters; medians, seconds")
    for name, samples in found["samples"].items():
        if not samples:
            continue
        medians = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
        print(f"{name:28}", "  ".join(f"{key} {value:.3f}" for key, value in medians.items()), f"({len(samples)})")
    for name, text in found["errors"].items():
        print(f"{name:28} failed: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
