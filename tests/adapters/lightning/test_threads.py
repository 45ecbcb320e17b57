"""A save that Lightning tells nobody the end of leaves no more threads than Lightning's own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from datastates import _native
from datastates.errors import StorageError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")
Act = Callable[[ModuleType, Path, Any], None]
"""What a program does, given the training, a folder and the plugin, or None for Lightning's own."""


def after_a_fit(training: ModuleType, folder: Path, io: Any) -> None:
    trainer = training.trainer(folder, 2, io)
    trainer.fit(training.Module(), training.data())
    trainer.save_checkpoint(folder / "after.ckpt")


def at_the_end_of_a_fit(training: ModuleType, folder: Path, io: Any) -> None:
    class Saving(training.pl.Callback):  # type: ignore[misc, name-defined]
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(folder / "end.ckpt")

    training.trainer(folder, 2, io, Saving()).fit(training.Module(), training.data())


def before_a_fit(training: ModuleType, folder: Path, io: Any) -> None:
    trainer = training.trainer(folder, 2, io)
    trainer.strategy.connect(training.Module())
    trainer.save_checkpoint(folder / "before.ckpt")


def by_a_callback_outside_of_a_fit(training: ModuleType, folder: Path, io: Any) -> None:
    trainer = training.trainer(folder, 2, io)
    trainer.strategy.connect(training.Module())
    trainer.checkpoint_callback._save_checkpoint(trainer, str(folder / "called.ckpt"))


def in_async_checkpoint_io(training: ModuleType, folder: Path, io: Any) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    saving = {"every_n_train_steps": 1, "save_top_k": -1}  # a deletion would race with saves, with stock, too
    training.trainer(folder, 3, AsyncCheckpointIO(io), **saving).fit(training.Module(), training.data())


def by_fabric(training: ModuleType, folder: Path, io: Any) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[] if io is None else [io])
    for number in range(2):
        fabric.save(folder / f"{number}.ckpt", {"model": torch.nn.Linear(512, 512)})


@pytest.mark.long
@pytest.mark.parametrize(
    "act",
    [
        after_a_fit,
        at_the_end_of_a_fit,
        before_a_fit,
        by_a_callback_outside_of_a_fit,
        in_async_checkpoint_io,
        by_fabric,
    ],
)
def test_threads_and_files_are_those_of_lightning(act: Act, training: ModuleType, io: Any, tmp_path: Path) -> None:
    seen = []
    for name, plugin in (("stock", None), ("ours", io)):
        before = set(threading.enumerate())
        training.quiet()
        act(training, tmp_path / name, plugin)
        threads = sorted(thread.name for thread in threading.enumerate() if thread not in before)
        seen.append((threads, sorted(path.name for path in (tmp_path / name).iterdir())))
    assert seen[0] == seen[1]
    assert all(torch.load(path, weights_only=True) for path in (tmp_path / "ours").iterdir())


def test_a_save_outside_of_a_fit_that_fails_leaves_none_either(training: ModuleType, io: Any, tmp_path: Path) -> None:
    trainer = training.trainer(tmp_path, 2, io)
    trainer.strategy.connect(training.Module())
    before = set(threading.enumerate())
    _native.arm_fault("write", "fail", errno.ENOSPC, 1, 1)
    with pytest.raises(StorageError, match="No space"):
        trainer.save_checkpoint(tmp_path / "before.ckpt")
    assert set(threading.enumerate()) <= before
    assert list(tmp_path.iterdir()) == []
    io.teardown()  # the failure is told once
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["again.ckpt"]
