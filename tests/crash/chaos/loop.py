"""A training loop of one's own, as the README has it, on one rank or on several with DDP."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from task import EVERY, STEPS, arguments, batch, finish, network

import datastates as ds
from datastates.providers import PickledObjectProvider, ReplicatedProvider, RngProvider, from_stateful


def newest(out: Path) -> Path | None:
    found = [(int(m[1]), p) for p in out.iterdir() if (m := re.fullmatch(r"step-([0-9]+)\.pt", p.name))]
    return max(found)[1] if found else None


def main() -> None:
    given = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    bare = network()
    model = torch.nn.parallel.DistributedDataParallel(bare) if world > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    progress = {"step": 0}

    def train(step: int) -> None:
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        progress["step"] = step

    if given.way == "stock":
        if path := newest(given.out):
            state = torch.load(path, weights_only=True)
            bare.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            progress.update(state["progress"])
        started = progress["step"]
        for step in range(started + 1, STEPS + 1):
            train(step)
            if step % EVERY == 0 and rank == 0:
                state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
                torch.save(state, given.out / f"step-{step:08d}.pt")
    else:
        states = from_stateful("optimizer", optimizer)
        providers = [
            from_stateful("model", model),
            ReplicatedProvider(states) if world > 1 else states,
            RngProvider(),
            PickledObjectProvider("progress", get=lambda: progress, set=progress.update),
        ]
        with ds.Checkpointer(given.out) as ckpt:
            ckpt.restore(providers)
            started = progress["step"]
            for step in range(started + 1, STEPS + 1):
                train(step)
                if step % EVERY == 0:
                    ckpt.snapshot(providers, step=step)
    finish(given.out, bare.state_dict(), started)


if __name__ == "__main__":
    main()
