"""transformers' Trainer, which resumes from its newest folder; with --deepspeed, over DeepSpeed."""

from __future__ import annotations

import os

import torch
from task import EVERY, STEPS, arguments, finish
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens.clone()}


def main() -> None:
    given = arguments()
    if given.deepspeed:
        os.environ.update(ONE_RANK)  # DeepSpeed would look for MPI
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    deepspeed = {**DEEPSPEED, **({"datastates_ckpt": {}} if given.way == "ours" else {})}
    options = TrainingArguments(
        output_dir=str(given.out),
        max_steps=STEPS,
        save_steps=EVERY,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        seed=0,
        data_seed=0,
        disable_tqdm=True,
        deepspeed=deepspeed if given.deepspeed else None,
        bf16=given.deepspeed,
    )
    trainer = Trainer(model=model, args=options, train_dataset=Tokens())
    if given.way == "ours" and not given.deepspeed:
        from datastates.adapters.transformers import attach

        attach(trainer)
    last = get_last_checkpoint(str(given.out))
    started = int(last.rpartition("-")[2]) if last else 0
    trainer.train(resume_from_checkpoint=last)
    finish(given.out, trainer.model.state_dict(), started)


if __name__ == "__main__":
    main()
