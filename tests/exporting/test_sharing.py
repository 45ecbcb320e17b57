"""Exports that share the blocks of the checkpoint, where the file system can."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reflinks
import torch
from safetensors.torch import load_file
from short import first

import datastates as ds
from datastates._base.sizes import PAGE
from datastates.exporting import copying
from datastates.providers import from_state_dict
from datastates.storage import Location, store_of

ON_IMAGE = """
import os, subprocess, sys
import torch
from safetensors.torch import load_file
import datastates as ds
from datastates.providers import from_state_dict

def used():
    os.sync()
    found = os.statvfs(".")
    return (found.f_blocks - found.f_bfree) * found.f_frsize

os.chdir(sys.argv[1])
torch.manual_seed(0)
state = {f"layer.{i}": torch.randn(1024, 4096) for i in range(4)}
ds.snapshot([from_state_dict("m", state)], "saved").wait_committed()
folders = {"": True}
if sys.argv[2] == "btrfs":  # it shares no blocks between files with and without copy-on-write (chattr +C)
    os.mkdir("nocow")
    subprocess.run(["chattr", "+C", "nocow"], check=True)
    folders["nocow"] = False
for folder, shares in folders.items():
    for name in ("out.pt", "out.safetensors"):
        before, target = used(), os.path.join(folder, name)
        ds.export("saved", target)
        assert (used() - before < 8 << 20) == shares, (target, used() - before)
        found = torch.load(target) if name == "out.pt" else load_file(target)
        assert all(torch.equal(found[key], tensor) for key, tensor in state.items())
"""
MAKE = {
    "xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"],
    "btrfs": ["mkfs.btrfs", "-q"],
    "btrfs compressed": ["mkfs.btrfs", "-q"],
}


def states() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(300, 1024),
        "odd": torch.randn(70_001),
        "small": torch.randn(5),
        "t": torch.randn(64, 512).t(),
    }


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(copying, "SHORTEST", PAGE)
    monkeypatch.setattr(copying, "MOST_MEMORY", 3 * 64 << 10)
    ds.snapshot([from_state_dict("m", states())], tmp_path / "saved").wait_committed()
    return tmp_path / "saved"


def read(target: Path) -> Any:
    return torch.load(target) if target.suffix == ".pt" else load_file(target)


@pytest.mark.parametrize(("name", "most"), [("out.pt", 3 * 64 << 10), ("out.safetensors", 7 * 64 << 10)])
def test_whole_pages_are_shared_and_the_rest_is_written(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    shared: list[tuple[int, int]] = []
    monkeypatch.setattr(reflinks, "ranges", shared)
    monkeypatch.setattr(fcntl, "ioctl", reflinks.clone)
    plain = os.pwrite
    written: list[int] = []
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(n := plain(fd, data, at)) or n)
    done = ds.export(saved, tmp_path / name)
    found = read(tmp_path / name)
    assert all(torch.equal(found[key], tensor) for key, tensor in states().items())
    total = sum(nbytes for _, nbytes in shared)
    assert total > 1_000_000
    assert sum(written) - total < most
    assert done.nbytes == (tmp_path / name).stat().st_size
    shared.clear()
    ds.export(saved, tmp_path / f"cast-{name}", dtype="bf16")  # no byte of it is as it was
    ds.export(tmp_path / name, tmp_path / f"again-{name}")  # another tool may write to such a file meanwhile
    assert shared == []


def test_a_file_system_that_refuses_is_asked_once(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(*where: int) -> None:
        asked.append(where[1])
        raise OSError(errno.EOPNOTSUPP, "refused")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    ds.export(saved, tmp_path / "out.pt")
    assert len(asked) == 1
    assert all(torch.equal(read(tmp_path / "out.pt")[key], tensor) for key, tensor in states().items())


def test_the_files_of_many_ranks_are_not_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[set[str]] = []
    paths = [Location(tmp_path / str(rank)) for rank in range(20)]

    def note(*clone: int) -> None:
        files = Path("/proc/self/fd").iterdir()
        opened.append({str(path) for path in paths} & {os.path.realpath(file) for file in files})

    monkeypatch.setattr(fcntl, "ioctl", note)
    for path in paths:
        store_of(path).touch(path)
    stretches = [copying.Stretch(path, 0, number * PAGE, PAGE) for number, path in enumerate(paths)]
    target = Location(tmp_path / "target")
    with contextlib.closing(store_of(target).writer(target, direct=False)) as writer:
        assert len(list(copying.Sharing(writer).share(stretches))) == len(opened) == 20
    assert opened == [{str(path)} for path in paths]


@pytest.mark.long
@pytest.mark.parametrize("kind", first(MAKE, rest=pytest.mark.by_hand))
def test_reflinks_take_no_space(tmp_path: Path, kind: str) -> None:
    name, *compressed = kind.split()
    if os.geteuid() or not shutil.which(MAKE[kind][0]):
        pytest.skip(f"to mount {name} needs root and {MAKE[kind][0]}")
    image, at = tmp_path / "image", tmp_path / "at"
    at.mkdir()
    with image.open("wb") as made:
        made.truncate(768 << 20)
    subprocess.run([*MAKE[kind], image], check=True)
    options = "loop,compress-force=zstd" if compressed else "loop"
    command = f'mount -o {options} "{image}" "{at}" || exit 77; "{sys.executable}" -c "$0" "{at}" {name}'
    done = subprocess.run(["unshare", "-m", "sh", "-c", command, ON_IMAGE], check=False)
    if done.returncode == 77:
        pytest.skip(f"this system mounts no {name} on a loop device")
    assert done.returncode == 0
