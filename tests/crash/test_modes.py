"""Who may read and write what is made: the umask decides, as for files that ``open()`` and ``mkdir()`` make."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from steps import OPTIONS, PRELUDE, providers

import datastates as ds
from datastates.commit.pending import Pending


@pytest.fixture(params=[0o022, 0o002, 0o077, 0o027], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root: Path) -> set[tuple[bool, int]]:
    """Whether an entry is a folder, and its mode, of each entry."""
    return {(path.is_dir(), path.stat().st_mode & 0o7777) for path in [root, *root.rglob("*")]}


def test_all_files_and_folders_have_the_modes_of_others(umask: int, tmp_path: Path) -> None:
    (tmp_path / "plain" / "folder").mkdir(parents=True)
    (tmp_path / "plain" / "file").write_bytes(b"")
    expected = modes(tmp_path / "plain")
    assert expected == {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}
    with ds.Checkpointer(tmp_path / "deep" / "run", **OPTIONS) as checkpointer:
        checkpointer.snapshot(providers(1), step=1).wait_committed()
    assert modes(tmp_path / "deep") == expected
    for name in ("one.safetensors", "one.pt"):
        ds.export(tmp_path / "deep" / "run", tmp_path / name, keys="model/*")
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o666 & ~umask
    ds.export(tmp_path / "deep" / "run", tmp_path / "folder", keys="model/*")
    assert modes(tmp_path / "folder") == expected
    pending = Pending(tmp_path / "pending").begin()
    assert modes(pending.directory) == expected
    pending.abandon()


def test_files_are_as_torch_saves_them(umask: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    adapter = pytest.importorskip("datastates.adapters.dcp")
    torch.save({}, tmp_path / "stock.pt")
    stock = (tmp_path / "stock.pt").stat().st_mode
    dcp.save({"w": torch.ones(1000)}, storage_writer=adapter.DataStatesStorageWriter(tmp_path / "c"), no_dist=True)
    assert {path.stat().st_mode for path in (tmp_path / "c").iterdir()} == {stock}
    del umask


OTHERS = """
import logging
logging.basicConfig(level="WARNING")
from datastates.commit.pending import Pending
from pathlib import Path

def save(user, step):
    os.seteuid(0)
    os.setegid(user)
    os.seteuid(user)
    with ds.Checkpointer(root, **OPTIONS) as checkpointer:
        checkpointer.snapshot(providers(step), step=step).wait_committed()

os.umask(0o022)
save(65533, 1)
left = Pending(Path(root) / "step-00000009").begin()
left.close()  # as if its process had died
save(65534, 2)
assert left.directory.exists()
os.seteuid(0)
with ds.Checkpointer(root, **OPTIONS) as checkpointer:
    checkpointer.snapshot(providers(2), step=2).wait_committed()
assert not left.directory.exists()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_another_user_left_keeps_nobody_out() -> None:
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o1777)  # as /tmp: everybody may add, and delete what is theirs
        done = subprocess.run(
            [sys.executable, "-P", "-c", PRELUDE + OTHERS, root], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "it is another user's, and is left" in done.stderr
        assert np.array_equal(ds.load(root)["model"]["a"], np.full(100_000, 2.0))
