"""A copy of a trainer that this package saves for trains and saves its own model, as without this package."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from by_path import module_at

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def training(name: str) -> Any:
    pytest.importorskip(name, reason=f"{name} is not installed: its tests did NOT run")
    return module_at(Path(__file__).parent / name / "training.py")


def weights(model: Any) -> Any:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_of_lightnings(copied: Any, tmp_path: Path) -> None:
    lightning, seen = training("lightning"), []
    for plugin in (None, lightning.DataStatesCheckpointIO(**lightning.OPTIONS)):
        root = tmp_path / str(plugin is None)
        trainer = lightning.trainer(root, 4, plugin)
        lightning.pl.seed_everything(3)
        trainer.fit(lightning.Module(), lightning.data())
        other = copied(trainer)
        assert other.global_step == trainer.global_step
        other.save_checkpoint(root / "again.ckpt")
        assert plugin is None or len(plugin.snapshots) == 1
        seen.append(torch.load(root / "again.ckpt", weights_only=False)["state_dict"])
    assert list(seen[0]) == list(seen[1])
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


@pytest.mark.by_hand
@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_of_transformers(trained: bool, tmp_path: Path) -> None:
    transformers, seen = training("transformers"), []
    for way in ("stock", "ours"):
        trainer = transformers.trainer(tmp_path / way, 2, save_steps=1)
        if way == "ours":
            transformers.attach(trainer, **transformers.OPTIONS)
        if trained:
            trainer.train()
        before = weights(trainer.model)
        other = copy.deepcopy(trainer)
        other.args.output_dir = str(tmp_path / f"copy of {way}")
        transformers.transformers.set_seed(4)
        other.train()
        assert torch.equal(weights(trainer.model), before)
        saved = tmp_path / f"copy of {way}" / "checkpoint-2" / "model.safetensors"
        seen.append((weights(other.model), saved.read_bytes()))
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1]
