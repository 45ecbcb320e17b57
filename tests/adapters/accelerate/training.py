"""A tiny model trained by accelerate's loop. As a program (FOLDER STEPS [stock] [fsdp1|fsdp2]) it resumes."""

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
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from datastates.adapters.accelerate import AcceleratorCheckpoints, attach

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"} | json.loads(os.environ.get("MORE", "{}"))
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

    def __init__(self, project: Path, *, lazy: bool = True, fsdp: int = 0, **configuration: Any) -> None:
        AcceleratorState._reset_state(True)
        set_seed(3)
        config = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True, **configuration)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        if fsdp:
            self._use_fsdp(fsdp)
        self.checkpoints: AcceleratorCheckpoints | None = attach(self.accelerator, **OPTIONS) if lazy else None
        net = Net()
        if fsdp == 1:  # it replaces the parameters, and the optimizer must have the new ones
            net = self.accelerator.prepare(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        if fsdp == 1:
            self.net, (self.optimizer, self.schedule) = net, self.accelerator.prepare(optimizer, schedule)
        else:
            self.net, self.optimizer, self.schedule = self.accelerator.prepare(net, optimizer, schedule)
        self.step = 0
        self.losses: list[float] = []
        self.accelerator.register_for_checkpointing(self)

    def _use_fsdp(self, version: int) -> None:
        """What the constructor does with a plugin for FSDP, but accelerate takes it on GPUs only."""
        state = self.accelerator.state
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
        )
        state.device_mesh = None
        state.device = torch.device("cpu")  # FSDP of version 1 does not take cpu:0 for it

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

    def whole(self) -> dict[str, torch.Tensor]:
        """The model's whole tensors, on all ranks."""
        if isinstance(self.net, FSDP):
            with FSDP.summon_full_params(self.net, writeback=False):
                named = [*self.net.named_parameters(), *self.net.named_buffers()]
                return {name.replace("_fsdp_wrapped_module.", ""): tensor.detach().clone() for name, tensor in named}
        state = self.accelerator.unwrap_model(self.net).state_dict()
        return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}

    def end(self) -> None:
        state = self.whole()
        if self.accelerator.is_main_process:
            torch.save(state, f"{self.accelerator.project_dir}-end.pt")
        self.accelerator.end_training()


if __name__ == "__main__":
    project, steps, *words = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    loop = Loop(project, lazy="stock" not in words, fsdp=2 * ("fsdp2" in words) + ("fsdp1" in words), total_limit=2)
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
