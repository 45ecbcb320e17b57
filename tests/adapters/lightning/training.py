"""A small module trained by Lightning. As a program (DIRECTORY STEPS [stock]) it resumes what is there."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datastates.adapters.lightning import DataStatesCheckpointIO

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"}
BATCHES = 4


class Module(pl.LightningModule):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)
        )
        self.losses: dict[int, float] = {}

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def data() -> Any:
    generator = torch.Generator().manual_seed(5)
    samples = torch.randn(8 * BATCHES, 16, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=8)


def trainer(directory: Path, steps: int, io: Any, *callbacks: Any, **options: Any) -> pl.Trainer:
    saving = {"dirpath": directory, "every_n_train_steps": BATCHES, "save_top_k": 1, "monitor": None, **options}
    return pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[] if io is None else [io],
        callbacks=[ModelCheckpoint(**saving), *callbacks],
    )


def quiet() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(7)


if __name__ == "__main__":
    quiet()
    directory, steps, *words = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    directory.mkdir(exist_ok=True)
    io = None if "stock" in words else DataStatesCheckpointIO(**OPTIONS, **json.loads(os.environ.get("MORE", "{}")))
    module, there = Module(), sorted(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    trainer(directory, steps, io).fit(module, data(), ckpt_path=there[-1] if there else None)
    trained = {"from": min(module.losses), "losses": list(module.losses.values())}
    print(json.dumps({"word": "trained", "value": trained}))
    torch.save(module.state_dict(), f"{directory}-end.pt")
