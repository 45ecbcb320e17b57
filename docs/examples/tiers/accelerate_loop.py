"""Checkpoints of accelerate go on to a bucket: ``python accelerate_loop.py PROJECT s3://bucket/run STEPS``.

On a fresh disk, ``datastates fetch s3://bucket/run PROJECT/checkpoints`` comes first.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

from datastates.adapters.accelerate import attach

project, bucket, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
configuration = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), project_config=configuration)
attach(accelerator, tiers=bucket)
set_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16))
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
there = sorted((project / "checkpoints").glob("checkpoint_*"))
step = 0
if there:
    accelerator.load_state()
    step = 2 * (1 + int(there[-1].name.rpartition("_")[2]))
while step < steps:
    accelerator.backward(net(torch.full((4, 16), step / 10, device=accelerator.device)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 2 == 0:
        configuration.iteration = step // 2 - 1
        accelerator.save_state()
accelerator.end_training()
print("sum of the weights:", sum(weight.double().sum().item() for weight in net.parameters()))
