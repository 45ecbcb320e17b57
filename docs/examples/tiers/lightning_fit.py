"""Lightning's Trainer, its checkpoints in a bucket, too: ``python lightning_fit.py DIRECTORY s3://bucket/run STEPS``.

On a fresh disk, ``datastates fetch s3://bucket/run DIRECTORY`` comes first.
"""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datastates.adapters.lightning import DataStatesCheckpointIO

directory, bucket, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Module(pl.LightningModule):
    """Learns to give zero."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 64)

    def training_step(self, batch, index):
        """The loss of a batch."""
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


pl.seed_everything(1)
module = Module()
trainer = pl.Trainer(
    max_steps=steps,
    logger=False,
    enable_progress_bar=False,
    plugins=[DataStatesCheckpointIO(tiers=bucket)],
    callbacks=[ModelCheckpoint(directory, "last", every_n_train_steps=2, save_top_k=1, enable_version_counter=False)],
)
trainer.fit(module, torch.utils.data.DataLoader(torch.ones(1, 16)), ckpt_path="last")
print("sum of the weights:", sum(weight.double().sum().item() for weight in module.parameters()))
