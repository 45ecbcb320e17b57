"""An export into a folder that is there writes inside it: the folder stays what it was."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import datastates as ds
from datastates.commit.names import partial
from datastates.errors import StorageError
from datastates.providers import from_state_dict
from datastates.storage import Location
from datastates.storage.local import LocalStore

WEIGHTS = {"a": torch.arange(1000.0), "b": torch.ones(1000)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ds.snapshot([from_state_dict("model", WEIGHTS)], tmp_path / "saved").wait_committed()
    return tmp_path / "saved"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def test_it_keeps_its_mode_and_place(saved: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o2770)
    before = folder.stat()
    monkeypatch.chdir(folder)  # as a shell that stands in it
    ds.export(saved, ".")
    after = folder.stat()
    assert (after.st_ino, stat.S_IMODE(after.st_mode)) == (before.st_ino, 0o2770)
    assert os.listdir(".") == ["model.safetensors"]
    assert load_file("model.safetensors").keys() == WEIGHTS.keys()


def test_a_link_to_one_is_followed(saved: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    ds.export(saved, tmp_path / "link", shard_size="4KB")
    assert (tmp_path / "link").is_symlink()
    assert len(list(folder.glob("model-0000?-of-00002.safetensors"))) == 2
    assert (folder / "model.safetensors.index.json").is_file()
    assert len(os.listdir(folder)) == 3


def test_a_mount_point_takes_it(saved: Path, folder: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode()}")
    try:
        ds.export(saved, folder)
        assert os.listdir(folder) == ["model.safetensors"]
    finally:
        subprocess.run(["umount", folder], check=True)
    assert os.listdir(folder) == []


def test_a_failure_between_the_names_leaves_it_empty(
    saved: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, named = LocalStore.rename_new, []

    def rename(store: LocalStore, source: Path, target: Path) -> None:
        if named:
            raise StorageError(errno.EIO, "rename", str(target))
        named.append(target.name)
        plain(store, source, target)

    monkeypatch.setattr(LocalStore, "rename_new", rename)
    with pytest.raises(StorageError):
        ds.export(saved, folder, shard_size="4KB")
    assert named == ["model-00001-of-00002.safetensors"]
    assert os.listdir(folder) == []


def test_what_a_killed_export_left_in_it_is_removed(saved: Path, folder: Path) -> None:
    (folder / "export.partial-01234567").mkdir()
    (folder / "export.partial-01234567" / "model.safetensors").write_bytes(b"half")
    ds.export(saved, folder)
    assert os.listdir(folder) == ["model.safetensors"]


@pytest.mark.parametrize("letter", ["x", "\u00e4", "\u4e2d"])
def test_what_is_under_way_has_a_name_that_ecryptfs_takes(letter: str) -> None:
    for count in range(1, 255 // len(letter.encode())):
        for name in (letter * count, f".{letter * count}"):
            assert len(os.fsencode(partial(Location(f"/folder/{name}"), "01234567").name)) <= 143


@pytest.mark.parametrize("length", [117, 118, 255])
def test_every_name_that_torch_takes_is_taken(saved: Path, tmp_path: Path, length: int) -> None:
    torch.save({}, tmp_path / ("t" * length))
    ds.export(saved, tmp_path / ("d" * length))
    ds.export(saved, tmp_path / ("e" * (length - 12) + ".safetensors"))
    ds.snapshot([from_state_dict("model", WEIGHTS)], tmp_path / ("s" * length)).wait_committed()
    umlauts = "\u00e4" * (length // 2)
    ds.export(saved, tmp_path / umlauts)
    assert load_file(tmp_path / umlauts / "model.safetensors").keys() == WEIGHTS.keys()
    assert not [name for name in os.listdir(tmp_path) if "partial" in name]


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_the_small_floats_of_safetensors(dtype: str, tmp_path: Path) -> None:
    weights = {"w": torch.ones(8).to(getattr(torch, dtype))}
    save_file(weights, tmp_path / "stock.safetensors")
    ds.snapshot([from_state_dict("model", weights)], tmp_path / "saved").wait_committed()
    ds.export(tmp_path / "saved", tmp_path / "ours.safetensors")
    ours, stock = (load_file(tmp_path / name)["w"] for name in ("ours.safetensors", "stock.safetensors"))
    assert ours.dtype == stock.dtype
    assert torch.equal(ours.view(torch.uint8), stock.view(torch.uint8))
