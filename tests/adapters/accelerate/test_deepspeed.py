"""accelerate with DeepSpeed, whose JSON file has the entry ``datastates_ckpt``: nothing is attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datastates.container.file import open_container

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: its tests did NOT run")

SCRIPT = """
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed

set_seed(3)
plugin = DeepSpeedPlugin(hf_ds_config={
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "datastates_ckpt": {"host_cache_size": 0.0625},
})
accelerator = Accelerator(deepspeed_plugin=plugin)
net = torch.nn.Linear(64, 256)
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

def train(begin, end):
    losses = []
    for number in range(begin, end):
        data = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
        loss = model(data).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

train(0, 3)
accelerator.save_state(sys.argv[1])
losses = train(3, 6)
accelerator.load_state(sys.argv[1])
assert train(3, 6) == losses
accelerator.end_training()
"""


@pytest.mark.by_hand
@pytest.mark.timeout(600)
def test_states_are_saved_lazily_and_loaded(ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    ranks(1, SCRIPT, folder, timeout=280, imported=(), DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="warning")
    files = sorted((folder / "pytorch_model").iterdir())
    assert len(files) == 2
    for file in files:
        open_container(file)  # this package wrote it
    assert (folder / "random_states_0.pkl").exists()
