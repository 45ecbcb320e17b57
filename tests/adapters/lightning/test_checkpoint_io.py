"""Checkpoints of Lightning's Trainer: lazily captured, complete or absent, and Lightning's own files."""

from __future__ import annotations

import errno
import subprocess
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hold import GATE, held

from datastates import _native
from datastates.errors import CorruptError, ProviderError, SettingsError, StorageError, TrustError
from datastates.files import looks
from datastates.files.transaction import Transaction
from datastates.testing.provider_tests import difference

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
# Lightning's warnings about loaders, accelerators and existing checkpoints are not tested here
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_files_are_those_that_lightning_writes(training: ModuleType, io: Any, tmp_path: Path) -> None:
    for name, plugin in (("stock", None), ("ours", io)):
        training.quiet()
        training.trainer(tmp_path / name, 8, plugin).fit(training.Module(), training.data())
    stock, ours = (tmp_path / name / "epoch=1-step=8.ckpt" for name in ("stock", "ours"))
    expected, found = (torch.load(path, weights_only=True) for path in (stock, ours))
    for checkpoint in (expected, found):
        checkpoint.pop("callbacks")  # it holds the path
    assert difference(found, expected) is None
    # Lightning without this package resumes from its file, and with this package from Lightning's own
    ends = []
    for path, plugin in ((ours, None), (stock, io)):
        module = training.Module()
        training.trainer(tmp_path / f"again-{len(ends)}", 12, plugin).fit(module, training.data(), ckpt_path=path)
        ends.append(dict(module.state_dict()))
    assert difference(ends[0], ends[1]) is None
    assert difference(dict(training.Module.load_from_checkpoint(ours).state_dict()), dict(found["state_dict"])) is None


def test_capture_goes_on_in_forward_and_backward_and_the_update_waits(
    training: ModuleType, io: Any, tmp_path: Path
) -> None:
    captured: dict[int, list[bool]] = {}
    expected: dict[str, Any] = {}

    class Watch(training.pl.Callback):  # type: ignore[misc, name-defined]
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            captured[trainer.global_step] = [snapshot.captured for snapshot in io.snapshots.values()]

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            expected.update({k: v.clone() for k, v in checkpoint["state_dict"].items()})

    training.quiet()
    with held("capture", until=GATE):
        training.trainer(tmp_path, training.BATCHES + 2, io, Watch()).fit(training.Module(1024), training.data())
    assert captured[training.BATCHES] == [False], "forward or backward waited for the capture"
    (path,) = tmp_path.glob("*.ckpt")
    snapshot = io.snapshots[path]
    assert snapshot.report.gate_seconds > 0
    assert difference(dict(torch.load(path, weights_only=True)["state_dict"]), expected) is None


def test_what_is_removed_stays_until_what_came_after_is_there(
    training: ModuleType, io: Any, tmp_path: Path, caplog: Any
) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    state = {"state_dict": {"w": torch.arange(1 << 20)}}
    io.save_checkpoint(state, first)
    io.files.wait()
    with held("sync", until=(Transaction, "see")):
        io.save_checkpoint(state, second)
        io.remove_checkpoint(first)
        with looks.unwatched():
            assert first.exists()
        assert not first.exists()  # who looks waits
    assert second.exists()
    _native.arm_fault("write", "fail", errno.ENOSPC, 1, 1)
    io.save_checkpoint(state, first)
    io.remove_checkpoint(second)
    io.files.wait()
    assert [path.name for path in tmp_path.iterdir()] == [second.name]
    assert "second.ckpt is kept" in caplog.text
    with pytest.raises(StorageError, match="No space"):
        io.teardown()
    io.teardown()  # the failure is told only once
    io.save_checkpoint(state, second)  # over an existing checkpoint, and after the end of a fit
    io.teardown()
    assert difference(torch.load(second, weights_only=True), state) is None


def test_removing_without_a_save_takes_no_memory(training: ModuleType, io: Any, tmp_path: Path) -> None:
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt" / "part").write_bytes(b"")
    io.remove_checkpoint(tmp_path / "folder.ckpt")
    io.remove_checkpoint(tmp_path / "nothing.ckpt")
    assert list(tmp_path.iterdir()) == []
    assert io.files._engine is None


@pytest.mark.by_hand
def test_nothing_is_lost_at_exit(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(HERE.parents[1] / "support")!r})
import torch
from hold import hold_until_exit
from datastates.adapters.lightning import DataStatesCheckpointIO
hold_until_exit("sync")
io = DataStatesCheckpointIO(host_cache="2MiB", block="1MiB")
for name in "ab":
    io.save_checkpoint({{"state_dict": {{"w": torch.arange(1 << 20)}}}}, {str(tmp_path)!r} + f"/{{name}}.ckpt")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", "b.ckpt"}


@pytest.mark.usefixtures("nothing_declared")
def test_what_cannot_be_saved_or_loaded_is_refused(training: ModuleType, io: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no_such"):
        training.DataStatesCheckpointIO(no_such=1)
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a", storage_options={})
    with pytest.raises(ProviderError, match="hook"):
        io.save_checkpoint({"hook": lambda: None}, tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="nothing"):
        io.load_checkpoint(tmp_path / "nothing")
    path = tmp_path / "b.ckpt"
    io.save_checkpoint({"state_dict": {"w": torch.ones(1 << 18)}, "id": uuid.UUID(int=1)}, path)
    with pytest.raises(TrustError, match="uuid"):
        io.load_checkpoint(path)
    assert io.load_checkpoint(path, weights_only=False)["id"] == uuid.UUID(int=1)
    data = bytearray(path.read_bytes())
    data[100_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="state_dict/w"):
        io.load_checkpoint(path, weights_only=False)


def test_the_address_of_a_store_is_left_to_lightning(training: ModuleType, io: Any, caplog: Any) -> None:
    from fsspec.implementations.memory import MemoryFileSystem
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    store, seen = MemoryFileSystem(), []
    for name, plugin in (("stock", TorchCheckpointIO()), ("ours", io)):
        folder = f"memory://{uuid.uuid4()}/{name}"
        training.quiet()
        training.trainer(folder, 8, plugin).fit(training.Module(), training.data())  # the first one is removed
        files = [path.rpartition("/")[2] for path in store.ls(folder, detail=False)]
        seen.append((files, plugin.load_checkpoint(f"{folder}/{files[0]}", weights_only=True)["state_dict"]))
    assert difference(*seen) is None
    assert seen[0][0] == ["epoch=1-step=8.ckpt"]
    assert sum("addresses of stores" in line for line in caplog.messages) == 1
    assert io.files._engine is None
    assert isinstance(io, TorchCheckpointIO)


def test_either_package_takes_it(training: ModuleType, io: Any) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    assert pl.Trainer(plugins=[io], accelerator="cpu", logger=False).strategy.checkpoint_io is io
