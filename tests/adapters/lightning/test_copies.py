"""A trainer with the plugin is copied and pickled as one without it."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import module_at

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # from Lightning itself


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_at(HERE / "training.py")


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.long
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_copy_of_a_trainer_that_has_saved(training: ModuleType, copied: Any, tmp_path: Path) -> None:
    seen = {}
    for way in ("stock", "ours"):
        plugin = training.DataStatesCheckpointIO(**training.OPTIONS) if way == "ours" else None
        trainer = training.trainer(tmp_path / way, 4, plugin)
        training.pl.seed_everything(3)
        trainer.fit(training.Module(), training.data())
        other = copied(trainer)
        assert other.global_step == trainer.global_step
        other.save_checkpoint(tmp_path / way / "again.ckpt")
        assert plugin is None or len(plugin.snapshots) == 1
        seen[way] = torch.load(tmp_path / way / "again.ckpt", weights_only=False)["state_dict"]
    assert list(seen["stock"]) == list(seen["ours"])
    assert all(torch.equal(seen["stock"][name], seen["ours"][name]) for name in seen["stock"])
