"""A copy of a Trainer trains and saves its own model, as without this package."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import module_at

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # about loaders without pinned memory, and from transformers itself


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_at(HERE / "training.py")


def weights(model: Any) -> Any:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.long
@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_of_a_trainer(training: ModuleType, trained: bool, tmp_path: Path) -> None:
    seen = {}
    for way in ("stock", "ours"):
        trainer = training.trainer(tmp_path / way, 2, save_steps=1)
        if way == "ours":
            training.attach(trainer, **training.OPTIONS)
        if trained:
            trainer.train()
        before = weights(trainer.model)
        other = copy.deepcopy(trainer)
        other.args.output_dir = str(tmp_path / f"copy of {way}")
        training.transformers.set_seed(4)
        other.train()
        assert torch.equal(weights(trainer.model), before)
        saved = tmp_path / f"copy of {way}" / "checkpoint-2" / "model.safetensors"
        seen[way] = (weights(other.model), saved.read_bytes())
    assert torch.equal(seen["stock"][0], seen["ours"][0])
    assert seen["stock"][1] == seen["ours"][1]
