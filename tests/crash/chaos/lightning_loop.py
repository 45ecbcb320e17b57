"""Lightning's Trainer, which resumes from ``last``; with --link, that is a link to the newest file."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from task import EVERY, STEPS, arguments, finish, network, rows


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Start(Callback):
    step: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


def main() -> None:
    given = arguments()
    plugins = []
    if given.way == "ours":
        from datastates.adapters.lightning import DataStatesCheckpointIO

        plugins.append(DataStatesCheckpointIO())
    start, module = Start(), Module()
    saved = ModelCheckpoint(
        dirpath=given.out / "checkpoints",
        filename="ck-{step}",
        every_n_epochs=1,
        save_top_k=-1,
        save_last="link" if given.link else True,
    )
    trainer = pl.Trainer(
        max_epochs=STEPS // EVERY,
        accelerator="cpu",
        devices=1,
        callbacks=[start, saved],
        plugins=plugins,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=given.out,
    )
    data = torch.utils.data.DataLoader(rows(EVERY * 16), batch_size=16)
    trainer.fit(module, data, ckpt_path="last")
    finish(given.out, module.state_dict(), trainer.global_step if start.step is None else start.step)


if __name__ == "__main__":
    main()
