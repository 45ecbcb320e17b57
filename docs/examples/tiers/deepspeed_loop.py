"""DeepSpeed, whose checkpoints go on to a bucket: ``torchrun deepspeed_loop.py DIRECTORY s3://bucket/run STEPS``.

On a fresh disk, ``datastates fetch s3://bucket/run DIRECTORY`` comes first. It also writes the file ``latest``.
"""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read as deepspeed is imported

import deepspeed

directory, bucket, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
deepspeed.init_distributed()
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "datastates_ckpt": {"tiers": [{"path": bucket, "keep_last": 3}]},
}
engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
if (directory / "latest").exists():
    engine.load_checkpoint(directory)
while engine.global_steps < steps:
    data = torch.full((4, 16), engine.global_steps / 10, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(data).float().square().mean())
    engine.step()
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint(directory)
engine.destroy()
print("sum of the weights:", sum(weight.double().sum().item() for weight in net.parameters()))
torch.distributed.destroy_process_group()
