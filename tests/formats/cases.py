"""One checkpoint of each format, made by the library that the format is of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import datastates as ds
from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.providers import from_state_dict


@dataclass(frozen=True)
class Case:
    """A format to test.

    Attributes:
        name: What the commands call it.
        make: Makes a checkpoint below a new path.
        keys: The full key of each tensor of :func:`weights`, by its name there.
        folder: Whether it is a folder of files.
        checked: Whether a flipped byte of that tensor is found.
        step: The step that it tells.
    """

    name: str
    make: Callable[[Path], None]
    keys: Callable[[str], str] = str
    folder: bool = True
    checked: bool = False
    step: int | None = None


def weights() -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes; those of a model have dots in their names."""
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(40, 7, dtype=torch.bfloat16),
        "matrix": torch.randn(700, 300),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "wide": torch.randn(3, 5, 7, dtype=torch.float64),
    }


def holder(path: Path) -> tuple[Path, int]:
    """The file that holds the tensor ``"matrix"``, and where in it are some bytes from the tensor's middle."""
    part = weights()["matrix"].numpy().tobytes()[4000:4064]
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return next((file, at) for file in files if (at := file.read_bytes().find(part)) > 0)


def _own(path: Path) -> None:
    ds.snapshot([from_state_dict("model", weights())], path, step=7).wait_committed()


def _safetensors(path: Path) -> None:
    save_file(weights(), path)


def _hugging_face(path: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    path.mkdir()
    save_torch_state_dict(weights(), path, max_shard_size="400KB")
    assert (path / "model.safetensors.index.json").exists()


def _torch(path: Path) -> None:
    torch.save({"model": weights(), "epoch": 3}, path)


def _legacy(path: Path) -> None:
    torch.save({"model": weights(), "epoch": 3}, path, _use_new_zipfile_serialization=False)


def _dcp(path: Path) -> None:
    dcp.save({"model": weights(), "step": 3}, checkpoint_id=path, no_dist=True)


def _own_dcp(path: Path) -> None:
    writer = DataStatesStorageWriter(path)
    dcp.save({"model": weights(), "step": 3}, storage_writer=writer, no_dist=True)


def _lightning(path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in weights().items():
                self.register_buffer(name.replace(".", "_"), tensor)

        def forward(self) -> None: ...

    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, barebones=False)
    trainer.strategy.connect(Module())
    trainer.save_checkpoint(path)


def _older(path: Path) -> None:
    path.mkdir()
    files = {name: f"pytorch_model-{1 + (name == 'matrix'):05}-of-00002.bin" for name in weights()}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in weights().items() if files[name] == file}, path / file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _trainer(path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in weights().items():
                self.register_buffer(name.replace(".", "_"), tensor)
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.scale * x).sum()}

    arguments = TrainingArguments(
        output_dir=str(path.parent / "run"), max_steps=3, save_steps=3, report_to="none", use_cpu=True
    )
    Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(1)}] * 8).train()
    (path.parent / "run" / "checkpoint-3").rename(path)
    (path.parent / "run").rmdir()


DCP = "a checkpoint of torch.distributed.checkpoint"
CASES: Mapping[str, Case] = {
    "own": Case("a checkpoint of datastates", _own, lambda name: f"model/{name}", checked=True, step=7),
    "safetensors": Case("a safetensors file", _safetensors, folder=False),
    "torch": Case("a file of torch.save", _torch, lambda name: f"model/{name}", folder=False, checked=True),
    "legacy": Case("a file of torch.save", _legacy, lambda name: f"model/{name}", folder=False),
    "dcp": Case(DCP, _dcp, lambda name: f"model.{name}", checked=True),
    "own_dcp": Case(DCP, _own_dcp, lambda name: f"model.{name}", checked=True),
    "lightning": Case(
        "a checkpoint of Lightning",
        _lightning,
        lambda name: f"state_dict/{name.replace('.', '_')}",
        folder=False,
        checked=True,
        step=0,
    ),
    "hugging_face": Case("a folder of Hugging Face weights", _hugging_face),
    "hugging_face_older": Case("a folder of Hugging Face weights", _older, checked=True),
    "trainer": Case("a checkpoint of a Trainer", _trainer, lambda name: name.replace(".", "_"), step=3),
}
