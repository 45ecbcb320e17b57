"""Train a small GPT with DeepSpeed's ZeRO-2 and lazy checkpoints; started again, it goes on where the last one was.

``torchrun --nproc-per-node 2 docs/examples/deepspeed/train.py --checkpoints DIR``, on GPUs where there are any, else on
the CPU. Beside ``"datastates_ckpt"`` in ds_config.json nothing here is about this package, but for :func:`tell`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read as deepspeed is imported

import deepspeed

CONFIG = Path(__file__).with_name("ds_config.json")
CONTEXT = 64
SYMBOLS = 256


class Gpt(nn.Module):
    """A GPT over bytes, of about 0.8 million parameters, input and output embedding tied."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time) bytes to (batch, time, symbols) logits."""
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=later)
        return self.head(self.norm(x))


def english() -> torch.Tensor:
    """The text of Python's own help pages, as bytes."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode()))


def train(checkpoints: Path, steps: int, every: int, die_at: int | None) -> None:
    """Train up to ``steps`` optimizer steps, with a checkpoint after ``every`` so many; resumes the newest."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.manual_seed(0)
    text = english()
    model = Gpt()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=str(CONFIG))
    path, client = engine.load_checkpoint(checkpoints)
    start = client["step"] if path else 0
    if engine.global_rank == 0:
        print(f"starting at step {start}", flush=True)
    for step in range(start, steps):
        for micro in range(engine.gradient_accumulation_steps()):
            # what is drawn depends on the step only: DeepSpeed's checkpoints do not hold random states
            draw = torch.Generator().manual_seed((step * 64 + micro) * 64 + engine.global_rank)
            at = torch.randint(len(text) - CONTEXT - 1, (engine.train_micro_batch_size_per_gpu(),), generator=draw)
            rows = torch.stack([text[i : i + CONTEXT + 1] for i in at.tolist()]).to(engine.device)
            logits = engine(rows[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            engine.backward(loss)
            engine.step()  # the first after a save waits until that is captured, and only for that
        if engine.global_rank == 0:
            print(f"step {step + 1} loss {loss.item()}", flush=True)
        if (step + 1) % every == 0:
            engine.save_checkpoint(checkpoints, client_state={"step": step + 1})
            if step + 1 == die_at:
                os.kill(os.getpid(), signal.SIGKILL)  # save_checkpoint() has returned, the files are still on their way
    engine.destroy()  # waits until every checkpoint is complete
    if engine.global_rank == 0 and start < steps:
        tell(engine)


def tell(engine: deepspeed.DeepSpeedEngine) -> None:
    """Print what the last checkpoint has cost this rank, and write a timeline of its largest file."""
    save = engine.checkpoint_engine.ckpt_engine.saves[-1]
    print(f"{save.tag}: training waited {1e3 * save.stall_seconds:.1f} ms")
    for path, report in save.reports.items():
        print(f"  {path.name}: {report.nbytes / 1e6:.1f} MB, on storage {report.persist_seconds:.3f} s after the call")
    largest = max(save.snapshots.values(), key=lambda snapshot: snapshot.report.nbytes)
    largest.trace("trace.json")  # open it in https://ui.perfetto.dev


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="kill each rank while this step's files are written")
    parser.add_argument("--local_rank", type=int, help="what DeepSpeed's launcher gives; the environment says it, too")
    arguments = parser.parse_args()
    train(arguments.checkpoints, arguments.steps, arguments.save_every, arguments.die_at)


if __name__ == "__main__":
    main()
