"""Several GPUs of one host, a process for each, over NCCL: FSDP2, tensor parallelism and replicas move between 2 and 4.

Without GPUs the same runs on the CPU, over gloo, with ``DATASTATES_TEST_RANKS=cpu``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

DISTRIBUTED = Path(__file__).parents[1] / "distributed"
SCRIPT = DISTRIBUTED / "torch_layouts.py"
DEVICE = os.environ.get("DATASTATES_TEST_RANKS", "cuda")
gpus = torch.cuda.device_count()
two = pytest.mark.skipif(DEVICE == "cuda" and gpus < 2, reason=f"needs 2 GPUs, {gpus} here: did NOT run")
four = pytest.mark.skipif(DEVICE == "cuda" and gpus < 4, reason=f"needs 4 GPUs, {gpus} here: did NOT run")


@two
def test_every_snapshot_is_captured_before_the_next_update(ranks: Any, tmp_path: Path) -> None:
    ranks(2, SCRIPT, tmp_path, "gate:fsdp", "gate:ddp", timeout=150, DEVICE=DEVICE)


@two
def test_layouts_of_two_ranks(ranks: Any, tmp_path: Path) -> None:
    saves = ["save:fsdp", "save:named_fsdp", "save:ddp"]
    takes = ["take:fsdp:fsdp-2", "take:fsdp:ddp-2", "take:ddp:fsdp-2", "take:named_fsdp:named_fsdp-2"]
    ranks(2, SCRIPT, tmp_path, *saves, *takes, timeout=150, DEVICE=DEVICE)
    ranks(1, SCRIPT, tmp_path, "take:plain:fsdp-2", "take:plain:ddp-2", timeout=150, DEVICE=DEVICE)


@four
def test_between_four_and_two_ranks(ranks: Any, tmp_path: Path) -> None:
    saves = ["save:fsdp", "save:grid", "save:hybrid", "save:ddp"]
    ranks(4, SCRIPT, tmp_path, *saves, "take:grid:fsdp-4", "take:hybrid:grid-4", timeout=150, DEVICE=DEVICE)
    takes = ["take:fsdp:fsdp-4", "take:fsdp:grid-4", "take:fsdp:hybrid-4", "take:ddp:ddp-4", "take:ddp:grid-4"]
    ranks(2, SCRIPT, tmp_path, *takes, "save:fsdp", timeout=150, DEVICE=DEVICE)
    ranks(4, SCRIPT, tmp_path, "take:fsdp:fsdp-2", "take:grid:fsdp-2", "gate:grid", timeout=150, DEVICE=DEVICE)
