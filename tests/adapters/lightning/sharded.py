"""A small module sharded by FSDP, trained by Lightning on several ranks (arguments: DIRECTORY STEPS [stock])."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from datastates.adapters.lightning import attach
from training import BATCHES, OPTIONS, Module, data, quiet


class Sharded(Module):
    def __init__(self, width: int = 1024) -> None:
        super().__init__(width)
        self.net[1] = torch.nn.LayerNorm(width)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net, mesh=mesh)
        self.register_buffer("spread", distribute_tensor(torch.arange(8.0), mesh))


class Wrapped(Module):
    """For FSDP of version 1, which takes no DTensors. The strategy wraps it."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__(width)
        self.net[1] = torch.nn.LayerNorm(width)
        self.register_buffer("spread", torch.arange(8.0))


class OnCpus(FSDPStrategy):
    """Lightning wraps for GPUs only, and refuses an ``FSDPStrategy`` on CPUs, but no subclass of it."""

    def _setup_model(self, model: Any) -> Any:
        return FSDP(model, device_id=self.root_device, **self.kwargs)


def trainer(
    directory: Path, steps: int, strategy: Any, *callbacks: Any, devices: int = 2, **options: Any
) -> pl.Trainer:
    saving = {"dirpath": directory, "filename": "{step}", "every_n_train_steps": BATCHES, "save_top_k": 1, **options}
    return pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(monitor=None, **saving), *callbacks],
    )


def strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def fsdp1() -> FSDPStrategy:
    return OnCpus(auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded", process_group_backend="gloo")


def leave() -> None:
    """Exit without the interpreter's shutdown, in which threads of gloo may abort."""
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    quiet()
    directory, steps, *words = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    chosen = strategy()
    if "stock" not in words:
        attach(chosen, **OPTIONS)
    there = sorted(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    module = Sharded()
    trainer(directory, steps, chosen).fit(module, data(), ckpt_path=there[-1] if there else None)
    state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in module.state_dict().items()}
    if chosen.is_global_zero:
        trained = {"from": min(module.losses), "losses": list(module.losses.values())}
        print(json.dumps({"word": "trained", "value": trained}))
        torch.save(state, f"{directory}-end.pt")
    leave()
