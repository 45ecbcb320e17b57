"""Lightning's own wrapper around the plugin: it drains its thread, but never tells the plugin that a fit ended."""

from __future__ import annotations

import errno
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hold import held

from datastates import _native
from datastates.errors import StorageError
from datastates.files.torch_files import TorchFiles

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")


def _fit(training: ModuleType, io: Any, directory: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    training.quiet()
    saving = {"save_last": True, "every_n_train_steps": training.BATCHES}
    trainer = training.trainer(directory, training.BATCHES, AsyncCheckpointIO(io), **saving)
    trainer.fit(training.Module(), training.data())


def test_a_fit_ends_once_every_checkpoint_has_its_name(training: ModuleType, io: Any, tmp_path: Path) -> None:
    with held("sync", until=(TorchFiles, "finish")):
        _fit(training, io, tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
    assert names == {"epoch=0-step=4.ckpt", "last.ckpt"}
    for name in names:
        assert torch.load(tmp_path / name, weights_only=True)["global_step"] == training.BATCHES


@pytest.mark.parametrize("nth", [1, 3])
def test_a_fit_whose_checkpoint_has_failed_raises(nth: int, training: ModuleType, io: Any, tmp_path: Path) -> None:
    _native.arm_fault("write", "fail", errno.ENOSPC, nth, 1)
    with pytest.raises(StorageError, match="No space"):
        _fit(training, io, tmp_path)
    assert all(path.suffix == ".ckpt" for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():
        torch.load(path, weights_only=True)


def test_a_failure_is_told_once(training: ModuleType, io: Any, tmp_path: Path) -> None:
    _native.arm_fault("write", "fail", errno.ENOSPC, 1, 1)
    with pytest.raises(StorageError, match="No space"):
        _fit(training, io, tmp_path)
    io.teardown()
