"""A file system that loses files of a folder that is renamed is refused before a checkpoint is lost there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import datastates as ds
from datastates.commit import fence, manifest, trial
from datastates.errors import StorageError
from datastates.providers import HostTensorProvider
from datastates.storage import Location
from datastates.storage.local import LocalStore

OPTIONS = {"host_cache": "2MiB", "block": "1MiB"}
Loss = Callable[[Path], None]


def providers(value: float = 1.0) -> list[HostTensorProvider]:
    return [HostTensorProvider("model", {"a": np.full(10, float(value))})]


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def unreadable(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)  # to look at it or to open it fails with ELOOP


LOSSES: list[Loss] = [emptied, Path.unlink, unreadable]


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loss, str], None]:
    """A function: from then on a renamed folder loses the files that match a pattern, by a loss."""
    real = LocalStore.rename

    def begin(loss: Loss, names: str = "*") -> None:
        def rename(store: LocalStore, source: Location, target: Location) -> None:
            real(store, source, target)
            if store.is_folder(target):
                for file in Path(target).rglob(names):
                    if file.is_file():
                        loss(file)

        monkeypatch.setattr(LocalStore, "rename", rename)

    return begin


def left(root: Path) -> list[str]:
    """What is in a directory beside the records of its openings."""
    return sorted(path.name for path in root.iterdir() if path.name != fence.FOLDER)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_directory_that_loses_files_is_refused(loss: Loss, lossy: Callable[[Loss], None], tmp_path: Path) -> None:
    lossy(loss)
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        for step in (1, 2):
            with pytest.raises(
                StorageError, match=r"lost as the folder around it is renamed.*before version 1\.62"
            ) as caught:
                ckpt.snapshot(providers(), step=step).wait_committed()
            assert caught.value.errno == errno.EIO
        assert ckpt.steps() == left(tmp_path) == []
    assert not list(tmp_path.rglob(f"{trial.PREFIX}*"))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_single_snapshot_is_refused(loss: Loss, lossy: Callable[[Loss], None], tmp_path: Path) -> None:
    lossy(loss)
    with pytest.raises(StorageError, match="lost as the folder around it is renamed"):
        ds.snapshot(providers(), tmp_path / "one", **OPTIONS).wait_committed()
    assert left(tmp_path) == []


def test_an_export_to_a_folder_is_refused_and_one_to_a_file_is_not(
    lossy: Callable[[Loss], None], tmp_path: Path
) -> None:
    ds.snapshot(providers(), tmp_path / "one", **OPTIONS).wait_committed()
    lossy(emptied)
    with pytest.raises(StorageError, match="lost as the folder around it is renamed"):
        ds.export(tmp_path / "one", tmp_path / "exports" / "folder")
    assert not (tmp_path / "exports").exists()
    ds.export(tmp_path / "one", tmp_path / "exports" / "one.safetensors")


@pytest.mark.parametrize("names", [manifest.FILE, manifest.container_name(0)])
def test_a_commit_that_loses_a_file_later_fails(names: str, lossy: Callable[[Loss, str], None], tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(), step=1).wait_committed()
        lossy(Path.unlink, names)
        with pytest.raises(StorageError, match=f"the renamed folder lacks {names}: "):
            ckpt.snapshot(providers(), step=2).wait_committed()
        assert ckpt.steps() == [1]
    assert left(tmp_path) == ["step-00000001"]


def test_what_keeps_its_files_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[Location] = []
    real = trial.refuse_loss
    monkeypatch.setattr(trial, "refuse_loss", lambda place: (tried.append(place), real(place))[1])
    with ds.Checkpointer(tmp_path / "run", **OPTIONS) as ckpt:
        for step in (1, 2):
            ckpt.snapshot(providers(), step=step).wait_committed()
    assert tried == [Location(tmp_path / "run" / fence.FOLDER)]
    for name in ("one", "two"):
        ds.snapshot(providers(), tmp_path / name, **OPTIONS).wait_committed()
    assert len(tried) == 2
