"""Training loops of the frameworks whose checkpoints are files, each with and without this package, stepped by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from by_path import module_at

from datastates.files import looks
from datastates.files.torch_files import TorchFiles

ADAPTERS = Path(__file__).parents[1] / "adapters"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 4096)
        self.register_buffer("seen", torch.zeros(3))
        self.outer = torch.nn.Linear(4096, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1  # in a pass, not in the update
        return self.outer(self.inner(x))  # type: ignore[no-any-return]


class Loop:
    """A loop, and the checkpoints that it saves below ``root`` by number.

    Attributes:
        files: What this package saves with; None without it.
        file: A name of a large file in a checkpoint; empty where a checkpoint is one file.
        knows_optimizers: Whether it copies parameters that no optimizer holds.
    """

    files: TorchFiles | None = None
    file = "optimizer.pt"
    path_of = "{}"
    knows_optimizers = True

    def __init__(self, root: Path, *, lazy: bool = True, **options: Any) -> None:
        torch.manual_seed(3)
        self.root, self.steps, self.net = root, 0, Net()
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.prepare()
        if lazy:
            self.attach({"host_cache": "2MiB", "block": "1MiB", **options})

    def prepare(self) -> None:
        """Make the framework's own objects."""

    def attach(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def forward(self) -> None:
        data = torch.randn(4, 64, generator=torch.Generator().manual_seed(self.steps))
        self.net(data).square().mean().backward()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.forward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def state(self) -> dict[str, Any]:
        """A copy of all that a checkpoint must hold."""
        states = self.optimizer.state_dict()["state"]
        found = {f"{key}/{name}": value for key, each in states.items() for name, value in each.items()}
        return {name: torch.as_tensor(t).clone() for name, t in (*self.net.state_dict().items(), *found.items())}

    def path(self, number: int) -> Path:
        return self.root / self.path_of.format(number)

    def save(self, number: int) -> None:
        raise NotImplementedError

    def load(self, number: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.files is not None:
            self.files.close()


class Lightning(Loop):
    """The plugin, called as a strategy calls it."""

    file, path_of = "", "{}.ckpt"

    def prepare(self) -> None:
        from lightning.fabric.plugins import TorchCheckpointIO

        self.io: Any = TorchCheckpointIO()

    def attach(self, options: dict[str, Any]) -> None:
        from datastates.adapters.lightning import DataStatesCheckpointIO

        self.io = DataStatesCheckpointIO(**options)
        self.files = self.io.files

    def save(self, number: int) -> None:
        state = {"state_dict": self.net.state_dict(), "optimizer_states": [self.optimizer.state_dict()], "epoch": 1}
        self.io.save_checkpoint(state, self.path(number))

    def load(self, number: int) -> None:
        found = self.io.load_checkpoint(self.path(number), weights_only=True)
        self.net.load_state_dict(found["state_dict"])
        self.optimizer.load_state_dict(found["optimizer_states"][0])

    def close(self) -> None:
        self.io.teardown()


class Accelerate(Loop):
    """``save_state`` to a folder that the program names."""

    file = "optimizer.bin"

    def prepare(self) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        self.accelerator: Any = Accelerator(cpu=True)
        self.net, self.optimizer = self.accelerator.prepare(self.net, self.optimizer)

    def attach(self, options: dict[str, Any]) -> None:
        from datastates.adapters.accelerate import attach

        self.files = attach(self.accelerator, **options).files

    def save(self, number: int) -> None:
        self.accelerator.save_state(self.path(number))

    def load(self, number: int) -> None:
        self.accelerator.load_state(self.path(number))

    def close(self) -> None:
        self.accelerator.end_training()


class Transformers(Loop):
    """A Trainer that is to save and to load as it does in ``train()``."""

    path_of = "checkpoint-{}"

    def prepare(self) -> None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        self.training = module_at(ADAPTERS / "transformers" / "training.py")
        self.trainer = self.training.trainer(self.root, 99, save_total_limit=None)
        self.trainer.create_optimizer_and_scheduler(99)
        self.trainer.optimizer = self.trainer.accelerator.prepare(self.trainer.optimizer)
        self.net, self.optimizer = self.trainer.model, self.trainer.optimizer

    def attach(self, options: dict[str, Any]) -> None:
        self.files = self.training.attach(self.trainer, **options).files

    def forward(self) -> None:
        torch.manual_seed(self.steps)  # for its dropout
        one = self.training.Data()[self.steps]
        self.net(**{name: tensor[None] for name, tensor in one.items()}).loss.backward()

    def save(self, number: int) -> None:
        self.trainer.args.output_dir, self.trainer.state.global_step = str(self.root), number
        self.trainer._save_checkpoint(self.net, None)

    def load(self, number: int) -> None:
        self.trainer._load_from_checkpoint(str(self.path(number)))
        self.trainer._load_optimizer_and_scheduler(str(self.path(number)))


class DeepSpeed(Loop):
    """The checkpoint engine, called as DeepSpeed calls it on one rank."""

    knows_optimizers = False

    def attach(self, options: dict[str, Any]) -> None:
        from datastates.adapters.deepspeed.checkpoint_engine import CheckpointEngine

        self.engine: Any = CheckpointEngine(SimpleNamespace(datastates_config=SimpleNamespace(config=options)), 0)
        self.files = self.engine._files

    def save(self, number: int) -> None:
        tag, latest = self.path(number), self.root / "latest"
        if self.files is None:
            self._write(tag, torch.save)
            latest.write_text(tag.name)
            return
        with looks.unwatched():
            self.engine.begin(SimpleNamespace(module=self.net), self.root, latest=True)
            try:
                self.engine.create(tag.name)
                self._write(tag, self.engine.save)
            except BaseException as error:
                self.engine.seal(error)
                raise
            self.engine.seal()

    def _write(self, tag: Path, save: Any) -> None:
        tag.mkdir(parents=True, exist_ok=True)
        save({"module": self.net.state_dict()}, str(tag / "module.pt"))
        save({"optimizer_state_dict": self.optimizer.state_dict()}, str(tag / "optimizer.pt"))

    def load(self, number: int) -> None:
        read = torch.load if self.files is None else self.engine.load
        self.net.load_state_dict(read(str(self.path(number) / "module.pt"))["module"])
        self.optimizer.load_state_dict(read(str(self.path(number) / "optimizer.pt"))["optimizer_state_dict"])

    def close(self) -> None:
        if self.files is not None:
            self.engine.close()


LOOPS = {"lightning": Lightning, "accelerate": Accelerate, "transformers": Transformers, "deepspeed": DeepSpeed}
