"""The training task of the loops that are killed: a small network, and batches that follow from the step alone."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

STEPS = 12
EVERY = 4


def arguments() -> argparse.Namespace:
    """The folder to save into, and the way to save: the framework's own, or this package's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["stock", "ours"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--link", action="store_true", help="Lightning only: last.ckpt is a link")
    parser.add_argument("--deepspeed", action="store_true", help="the Trainer only: over DeepSpeed")
    parsed = parser.parse_args()
    parsed.out.mkdir(parents=True, exist_ok=True)
    return parsed


def network() -> torch.nn.Module:
    """A network with buffers that the forward pass changes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )


def batch(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs (16, 8) and targets (16, 1) of a step."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs.sum(1, keepdim=True)


def rows(number: int) -> torch.utils.data.TensorDataset:
    """A data set of ``number`` samples, for frameworks that load the batches themselves."""
    inputs = torch.randn(number, 8, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def finish(out: Path, state: dict[str, torch.Tensor], started: int) -> None:
    """Say where this run began, and write the result that must not depend on kills."""
    print(f"resumed from step {started}", flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({key: value.clone() for key, value in state.items()}, out / "final.pt")
