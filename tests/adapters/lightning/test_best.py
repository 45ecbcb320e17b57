"""``keep_best`` keeps the steps that Lightning's ``save_top_k`` keeps, beside the newest; the differences are named."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import datastates as ds
from datastates.providers import from_stateful

pl = pytest.importorskip("lightning.pytorch")

NAN = math.nan
CASES: dict[str, tuple[str, list[float], set[int], set[int]]] = {
    "lowest": ("min", [5, 3, 4, 1, 6, 2, 7], {2, 4, 6}, {2, 4, 6}),
    "highest": ("max", [5, 3, 4, 1, 6, 2, 7], {1, 5, 7}, {1, 5, 7}),
    "NaN after three": ("min", [3, 2, 1, NAN, 4], {1, 2, 3}, {1, 2, 3}),
    "NaN that a number pushes out": ("max", [NAN, 2, 1, 3], {2, 3, 4}, {2, 3, 4}),
    # Lightning takes NaN for the worst number, and keeps it while there are fewer than three
    "NaN among the first": ("min", [2, NAN, 1, NAN], {1, 2, 3}, {1, 3}),
    # of equal ones, Lightning keeps the older, where it has three already
    "equal to the worst": ("min", [1, 2, 3, 3, 9], {1, 2, 3}, {1, 2, 4}),
    "equal to the best": ("min", [1, 2, 3, 1, 9], {1, 2, 4}, {1, 2, 4}),
    "all equal": ("max", [1, 1, 1, 1, 1], {1, 2, 3}, {3, 4, 5}),
}
"""The mode, the metrics of the steps from 1 on, and the steps that Lightning and we keep for being among the best."""


@pytest.mark.parametrize("name", CASES)
def test_the_same_steps_as_lightning(name: str, training: ModuleType, tmp_path: Path) -> None:
    mode, metrics, theirs, ours = CASES[name]
    training.quiet()

    class Module(training.Module):  # type: ignore[misc,name-defined]
        def training_step(self, batch: Any, index: int) -> Any:
            self.log("metric", metrics[self.global_step])
            return super().training_step(batch, index)

    class Save(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: object) -> None:
            metric = trainer.callback_metrics["metric"]
            ckpt.snapshot([from_stateful("net", module.net)], step=trainer.global_step, metric=metric)

    saving = {"monitor": "metric", "mode": mode, "save_top_k": 3, "every_n_train_steps": 1, "filename": "{step}"}
    with ds.Checkpointer(tmp_path / "ours", keep_best=3, best_mode=mode, **training.OPTIONS) as ckpt:
        training.trainer(tmp_path / "theirs", len(metrics), None, Save(), **saving).fit(Module(8), training.data())
        ckpt.wait()
        assert {*ckpt.steps()} == ours | {len(metrics)}
    assert {int(path.stem.removeprefix("step=")) for path in (tmp_path / "theirs").glob("*.ckpt")} == theirs
