"""Train a character-level GPT, lose it to SIGKILL in the middle of a checkpoint's write, resume it bit for bit.

``python docs/examples/gpt.py`` (or ``make demo``) runs the whole story in four processes: an uninterrupted run that
sets the reference; a run that is killed while a snapshot is being written; the run that resumes it; and torch.save
beside us. Every process is the same plain training loop: see :func:`train`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by CUDA: deterministic matrix products

import torch
from torch import nn
from torch.nn import functional

import datastates as ds
from datastates.cli import commands
from datastates.providers import PickledObjectProvider, RngProvider, from_stateful

STEPS = 40
EVERY = 5
KILL_AFTER = 22
CONTEXT = 64
BATCH = 4


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A GPT of about 10.8 million parameters, input and output embedding tied."""

    def __init__(self, symbols: int, width: int = 384, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(symbols, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time) symbols to (batch, time, symbols) logits."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def english() -> torch.Tensor:
    """The text of Python's own help pages, as symbol numbers."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = {symbol: i for i, symbol in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[symbol] for symbol in text])


def train(directory: Path, kill: bool) -> dict[str, object]:
    """A plain training loop with a checkpointer around it; resumes from whatever is in the directory."""
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cuda.enable_flash_sdp(enabled=False)  # on a GPU, attention by a kernel that is deterministic
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = english()
    model = Gpt(int(text.max()) + 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses: dict[int, str] = {}

    snapshots: list[ds.Snapshot] = []
    with ds.Checkpointer(directory, host_cache="256MiB", keep_last=2) as checkpointer:
        providers = [
            from_stateful("model", model),
            from_stateful("optimizer", optimizer),
            RngProvider(),
            PickledObjectProvider("losses", get=lambda: losses, set=losses.update),
        ]
        restored = checkpointer.restore(providers)
        start = restored.step if restored else 0
        for step in range(start, STEPS):
            at = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
            rows = torch.stack([text[i : i + CONTEXT + 1] for i in at.tolist()]).to(device)
            loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()  # waits until the last snapshot is captured, and only for that
            losses[step] = loss.item().hex()
            if (step + 1) % EVERY == 0:
                if kill and step >= KILL_AFTER:
                    die_in_the_next_write(directory)
                snapshots.append(checkpointer.snapshot(providers, step=step + 1))
        for snapshot in snapshots:
            snapshot.wait_committed()
        reports = [snapshot.report for snapshot in snapshots]
        baseline = [torch_save(directory / "torch_save.pt", model, optimizer) for _ in reports]
    return {
        "start": int(start),
        "losses": losses,
        "ours": [(r.stall_seconds, r.nbytes / (r.persist_seconds or 1.0)) for r in reports],
        "torch.save": baseline,
    }


def die_in_the_next_write(directory: Path) -> None:
    """SIGKILL this process as soon as the next container has begun to grow."""

    def watch() -> None:
        while True:
            for file in directory.glob("*.partial-*/*.pt"):
                with contextlib.suppress(FileNotFoundError):
                    if file.stat().st_blocks:
                        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def torch_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """What most loops do: (seconds of stall, bytes a second until durable)."""
    begin = time.perf_counter()
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    rate = path.stat().st_size / seconds
    path.unlink()
    return seconds, rate


def main() -> None:
    """Tell the story, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, metavar="DIR", help="only train, with checkpoints in DIR; prints JSON")
    parser.add_argument("--kill", action="store_true", help="with --train: die in the middle of a write")
    arguments = parser.parse_args()
    if arguments.train is not None:
        print(json.dumps(train(arguments.train, arguments.kill)))
        return

    def run(directory: Path, *options: str) -> tuple[int, str]:
        command = [sys.executable, __file__, "--train", str(directory), *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout

    with tempfile.TemporaryDirectory(dir=".", prefix="demo-") as scratch:
        whole, killed = Path(scratch, "whole"), Path(scratch, "killed")
        print(f"Training {STEPS} steps without interruption, a snapshot every {EVERY} …", flush=True)
        status, output = run(whole)
        if status:
            sys.exit(f"the reference run failed with status {status}")
        reference = json.loads(output)
        print("Training again, and killing it in the middle of a write …", flush=True)
        status, _ = run(killed, "--kill")
        if status != -signal.SIGKILL:
            sys.exit(f"the run should have been killed, but ended with status {status}")
        commands.main(["ls", str(killed)])
        print("Resuming …", flush=True)
        status, output = run(killed)
        if status:
            sys.exit(f"the resumed run failed with status {status}")
        resumed = json.loads(output)
        if resumed["losses"] != reference["losses"]:
            sys.exit("the losses differ")
        final = float.fromhex(resumed["losses"][str(STEPS - 1)])
        print(
            f"Resumed at step {resumed['start']}; all {STEPS} losses equal to the last bit (the last is {final:.4f}).\n"
        )

        figures = {name: reference[name] + resumed[name] for name in ("ours", "torch.save")}
        print(f"{'per checkpoint':24}{'stall':>12}{'until durable':>18}")
        for name, label in (("ours", "datastates"), ("torch.save", "torch.save + fsync")):
            stall = statistics.median(s for s, _ in figures[name])
            rate = statistics.median(r for _, r in figures[name])
            print(f"{label:24}{stall * 1e3:9.1f} ms{rate / 1e9:13.2f} GB/s")

        file = next(killed.glob(f"step-{STEPS:08d}/*.pt"))
        opened = torch.load(file, weights_only=True, mmap=True)
        ours = ds.load(killed)
        same = all(torch.equal(t, ours["model"][k]) for k, t in opened["model"].items())
        print(
            f"\ntorch.load({file.name!r}) finds {', '.join(opened)}: {'the same values' if same else 'OTHER VALUES'}."
        )
        if not same:
            sys.exit(1)


if __name__ == "__main__":
    main()
