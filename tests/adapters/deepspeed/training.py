"""What the tests train with DeepSpeed, and how they compare states. Each script begins by importing all of this."""
# ruff: noqa: F401

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

from datastates._base import faults
from datastates.adapters.deepspeed import load_checkpoint
from datastates.errors import RestoreError
from datastates.files import looks

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from hold import GATE, held
from in_ranks import PATIENCE, arm, end, fault, rank, say, together, wait_for

OURS: dict[str, Any] = {"host_cache_size": 0.0625}
TORCH = "torch"
ROWS = 4
TOKENS = 48


class Net(torch.nn.Module):
    """Tied embeddings, a frozen layer, and a buffer that every forward pass changes."""

    def __init__(self, width: int = 32, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(TOKENS, width)
        self.hidden = torch.nn.Linear(width, width + 8)
        self.register_buffer("mean", torch.zeros(width + 8))
        self.back = torch.nn.Linear(width + 8, width)
        self.frozen = torch.nn.Linear(width, width).requires_grad_(False)
        self.head = torch.nn.Linear(width, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        # the buffer depends on tokens that all ranks share, as DeepSpeed saves rank 0's buffers only
        hidden = self.hidden(self.embedding(torch.cat([torch.arange(2, device=tokens.device), tokens])))
        self.mean.mul_(0.9).add_(0.1 * hidden[:2].detach().mean(0).to(self.mean.dtype))
        return self.head(self.frozen(self.back(torch.relu(hidden[2:] - self.mean.to(hidden.dtype)))))


def begin() -> None:
    """Join the other ranks."""
    deepspeed.init_distributed()


def engine(stage: int = 2, entry: Any = OURS, dtype: str = "bf16", *, model: Any = None, **changed: Any) -> Any:
    """A DeepSpeed engine. ``entry`` is the datastates_ckpt entry, TORCH for none; ``changed`` are other keys."""
    torch.manual_seed(7)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000000,
        **changed,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if entry != TORCH:
        config["datastates_ckpt"] = entry
    net = Net() if model is None else model
    parameters = list(net.parameters())
    return deepspeed.initialize(model=net, config=config, model_parameters=parameters)[0]


def ours(trained: Any) -> Any:
    """The checkpoint engine of this package that a DeepSpeed engine saves with."""
    return trained.checkpoint_engine.ckpt_engine


def tokens(number: int) -> Any:
    """This rank's micro-batch with a number."""
    generator = torch.Generator().manual_seed(1000 * number + rank())
    return torch.randint(0, TOKENS, (ROWS,), generator=generator)


def step(trained: Any, number: int) -> float:
    """Train on the micro-batch with a number; returns the loss."""
    batch = tokens(number).to(trained.device)
    loss = torch.nn.functional.cross_entropy(trained(batch).float(), batch)
    trained.backward(loss)
    trained.step()
    return float(loss.detach())


def steps(trained: Any, first: int, last: int) -> list[float]:
    """Train on several micro-batches; returns their losses."""
    return [step(trained, number) for number in range(first, last)]


# --- what a state is


def leaves(value: Any, at: str = "") -> dict[str, str]:
    """Describe a nested value by the path of each leaf: tensors by type, shape and digest, objects by their fields."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        shape = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.device} grad={value.requires_grad}"
        return {at: f"{shape} {hashlib.sha256(data).hexdigest()[:16]}"}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, dict):
        found = {at: f"{kind} of {list(map(repr, value))}"}
        for key, item in value.items():
            found |= leaves(item, f"{at}/{key}")
    elif isinstance(value, (list, tuple)):
        found = {at: f"{kind} of {len(value)}"}
        for number, item in enumerate(value):
            found |= leaves(item, f"{at}/{number}")
    elif hasattr(value, "__dict__") and not isinstance(value, (Enum, type)):
        found = {at: kind}
    else:
        return {at: f"{kind} {value!r}"}
    for name, item in getattr(value, "__dict__", {}).items():  # containers may have some too
        found |= leaves(item, f"{at}.{name}")
    return found


def state(trained: Any) -> dict[str, str]:
    """The leaves of all that a checkpoint must restore."""
    return leaves(
        {
            "module": dict(trained.module.state_dict()),
            "optimizer": trained.optimizer.state_dict(),
            "scheduler": trained.lr_scheduler.state_dict(),
            "steps": (trained.global_steps, trained.global_samples, trained.skipped_steps),
        }
    )


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """Where two sets of leaves differ, and how."""
    places = [*first, *(place for place in second if place not in first)]
    found = ((place, first.get(place), second.get(place)) for place in places)
    return [f"{place}: {a} | {b}" for place, a, b in found if a != b]


# another process would see what these see: they do not wait for what is under way


@looks.unwatched()
def content(file: Path) -> dict[str, str]:
    """The leaves of a file, as torch reads it."""
    return leaves(torch.load(file, map_location="cpu", weights_only=False))


@looks.unwatched()
def names(directory: Path) -> list[str]:
    """All files below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def unlike(theirs: Path, own: Path) -> list[str]:
    """Where a file of this package differs from the one of DeepSpeed's torch engine."""
    saved, found = content(theirs), torch.load(own, map_location="cpu", weights_only=False)
    # DeepSpeed's clones for torch's engine lose module versions and gradients, and have tuples for shapes
    several = [differences(saved, leaves(value)) for value in (found, clone_tensors_for_torch_save(found))]
    # the checkpoint's files include the JSON file, which names the engine that saves
    return min(([line for line in lines if not line.startswith("/ds_config")] for lines in several), key=len)


def like_torch(root: Path, made: Any, train: Any) -> None:
    """Check that this package's files equal those of torch's engine, and that each engine reads the other's.

    Training goes on while this package saves. ``made(entry)`` gives an engine, and ``train(engine, first, end)`` trains
    it and gives its losses.
    """
    trained = made(TORCH)
    train(trained, 0, 2)
    trained.save_checkpoint(root / "torch", client_state={"next": 2})
    losses, end_state = train(trained, 2, 4), state(trained)
    trained.destroy()

    # each file with eager and lazy state keeps a block for as long as its capture is held
    trained = made({"host_cache": "32MiB", "block": "1MiB"})
    train(trained, 0, 2)
    with held("capture", until=GATE):
        trained.save_checkpoint(root / "ours", client_state={"next": 2})
        early = [snapshot.captured for snapshot in ours(trained).saves[-1].snapshots.values()]
        nbytes = sum(report.nbytes for report in ours(trained).saves[-1].reports.values())
        small = rank() > 0 and nbytes < 6 << 20
        assert small or not all(early), "nothing was left to capture after save_checkpoint()"
        assert train(trained, 2, 4) == losses
    ours(trained).wait()
    assert state(trained) == end_state
    trained.destroy()
    dist.barrier()

    expected = names(root / "torch")
    assert names(root / "ours") == expected, names(root / "ours")
    assert latest(root / "ours") == latest(root / "torch") == "global_step2"
    for name in (name for name in expected if name.endswith(".pt")):
        different = unlike(root / "torch" / name, root / "ours" / name)
        assert not different, (name, different)

    for writer, entry in (("ours", OURS), ("ours", TORCH), ("torch", OURS)):
        trained = made(entry)
        path, client = trained.load_checkpoint(root / writer)
        assert path, writer
        assert train(trained, client["next"], 4) == losses, (writer, entry)
        assert state(trained) == end_state, (writer, entry)
        trained.destroy()


def refused(trained: Any, directory: Path, why: str) -> None:
    """Check that loading on another number of ranks is refused with a reason, and changes nothing."""
    before = state(trained)
    with pytest.raises(RestoreError, match=re.escape(why)):
        load_checkpoint(trained, directory)
    assert state(trained) == before


# --- time and faults


@looks.unwatched()
def written(folder: Path) -> list[Path]:
    """The files in the folder of a checkpoint that have their names."""
    return list(folder.glob("*.pt"))


@looks.unwatched()
def latest(directory: Path) -> str | None:
    """The tag of the newest complete checkpoint."""
    file = directory / "latest"
    return file.read_text() if file.exists() else None


@contextlib.contextmanager
def watched(seen: list[str], look: Any) -> Iterator[None]:
    """Look again and again from another thread, and note each change."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            sight = look()
            if not seen or seen[-1] != sight:
                seen.append(sight)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
