"""A tiny language model trained by a Trainer. As a program (DIRECTORY STEPS [stock] [fsdp1|fsdp2]) it resumes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import get_last_checkpoint

from datastates.adapters.transformers import attach

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"} | json.loads(os.environ.get("MORE", "{}"))
EVERY = 5
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 56  # seven batches: the checkpoints are in the middle of an epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Sharded(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A Trainer with FSDP on CPUs: accelerate takes FSDP on GPUs only, so its state is set by hand."""

    VERSION: int

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=self.VERSION, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
        )
        state.device_mesh = None
        state.device = torch.device("cpu")  # FSDP of version 1 does not take cpu:0 for it
        self.is_fsdp_enabled = True


def trainer(directory: Path, steps: int, model: Any = None, *, fsdp: int = 0, **changed: Any) -> Any:
    transformers.set_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,  # training depends on the random state
        tie_word_embeddings=True,
    )
    arguments = {
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "save_steps": EVERY,
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "save_total_limit": 2,
        **changed,
    }
    Sharded.VERSION = fsdp
    return (Sharded if fsdp else transformers.Trainer)(
        model or transformers.LlamaForCausalLM(config),
        transformers.TrainingArguments(str(directory), **arguments),
        train_dataset=Data(),
        eval_dataset=Data(),
    )


def losses(trained: Any) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


if __name__ == "__main__":
    directory, steps, *words = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    made = trainer(directory, steps, fsdp=2 * ("fsdp2" in words) + ("fsdp1" in words))
    if "stock" not in words:
        attach(made, **OPTIONS)
    there = get_last_checkpoint(directory) if directory.exists() else None
    made.train(resume_from_checkpoint=there)
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in made.model.state_dict().items()}
    if made.args.process_index == 0:
        begun = int(there.rpartition("-")[2]) if there else 0
        print(json.dumps({"word": "trained", "value": {"from": begun, "losses": losses(made)[begun:]}}))
        torch.save(state, f"{directory}-end.pt")
    if made.args.world_size > 1:  # an interpreter with threads of gloo may abort at its shutdown
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)
