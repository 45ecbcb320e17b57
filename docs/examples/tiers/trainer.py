"""A Trainer whose checkpoints go on to a bucket: ``python trainer.py DIRECTORY s3://bucket/run STEPS``.

On a fresh disk, ``datastates fetch s3://bucket/run DIRECTORY`` comes first.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from datastates.adapters.transformers import attach

directory, bucket, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
set_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
)
arguments = TrainingArguments(
    directory,
    max_steps=steps,
    save_steps=2,
    save_total_limit=1,
    lr_scheduler_type="constant",
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    disable_tqdm=True,
)
tokens = torch.randint(0, 64, (64, 16))
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": one, "labels": one} for one in tokens])
attach(trainer, tiers=bucket)
trainer.train(resume_from_checkpoint=get_last_checkpoint(directory))
print("sum of the weights:", sum(weight.double().sum().item() for weight in model.parameters()))
