"""A tiny model trained by accelerate's loop. As a program (FOLDER STEPS [stock] [fsdp]) it resumes what is there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed

from datastates.adapters.accelerate import AcceleratorCheckpoints, attach

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"}
EVERY = 5


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 16384)
        self.register_buffer("seen", torch.zeros(3))
        self.drop = torch.nn.Dropout(0.1)  # training depends on the random state
        self.outer = torch.nn.Linear(16384, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1  # in a pass, not in the update
        return self.outer(self.drop(self.inner(x)))  # type: ignore[no-any-return]


class Loop:
    """A training loop as accelerate's users write it."""

    def __init__(self, project: Path, *, lazy: bool = True, fsdp: bool = False, **configuration: Any) -> None:
        AcceleratorState._reset_state(True)
        set_seed(3)
        config = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True, **configuration)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        if fsdp:
            self._use_fsdp()
        self.checkpoints: AcceleratorCheckpoints | None = attach(self.accelerator, **OPTIONS) if lazy else None
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        self.net, self.optimizer, self.schedule = self.accelerator.prepare(net, optimizer, schedule)
        self.step = 0
        self.losses: list[float] = []
        self.accelerator.register_for_checkpointing(self)

    def _use_fsdp(self) -> None:
        """What the constructor does with a plugin for FSDP, but accelerate takes it on GPUs only."""
        state = self.accelerator.state
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
        )
        state.device_mesh = None

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def forward(self) -> None:
        data = torch.Generator().manual_seed(10 * self.step + self.accelerator.process_index)
        loss = self.net(torch.randn(4, 64, generator=data)).square().mean()
        self.accelerator.backward(loss)
        self.losses.append(loss.item())

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1

    def train(self, steps: int) -> None:
        while self.step < steps:
            self.forward()
            self.update()
            if self.step % EVERY == 0:
                self.accelerator.project_configuration.iteration = self.step // EVERY
                self.accelerator.save_state()

    def resume(self, folder: Path | None = None) -> None:
        self.accelerator.load_state(folder)
        del self.losses[:]

    def end(self) -> None:
        state = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in self.accelerator.unwrap_model(self.net).state_dict().items()
        }
        if self.accelerator.is_main_process:
            torch.save(state, Path(self.accelerator.project_dir) / "end.pt")
        self.accelerator.end_training()


if __name__ == "__main__":
    project, steps, *words = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    loop = Loop(project, lazy="stock" not in words, fsdp="fsdp" in words, total_limit=2)
    there = (project / "checkpoints").exists() and any((project / "checkpoints").iterdir())
    if there:
        loop.resume()
    begun = loop.step
    loop.train(steps)
    main, several = loop.accelerator.is_main_process, loop.accelerator.num_processes > 1
    loop.end()
    if main:
        print(json.dumps({"word": "trained", "value": {"from": begun, "losses": loop.losses}}))
    if several:  # an interpreter with threads of gloo may abort at its end
        sys.stdout.flush()
        os._exit(0)
