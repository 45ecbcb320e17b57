"""A directory is the one that was opened: nothing is saved below a lost mount, or into what has taken its place."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hold import held

import datastates as ds
from datastates.commit import fence
from datastates.commit.fence import DirectoryOpening
from datastates.errors import StorageError
from datastates.providers import HostTensorProvider, ReplicatedProvider
from datastates.storage import Location, store_of

OPTIONS = {"host_cache": "2MiB", "block": "1MiB"}


def providers(value: float = 1.0) -> list[HostTensorProvider]:
    return [HostTensorProvider("model", {"a": np.full(10, float(value))})]


class Mount:
    """A folder of the same file system that is mounted at ``at``: the numbers of the devices are equal."""

    def __init__(self, at: Path, what: Path) -> None:
        self.at, self._what = at, what
        self.is_mounted = False

    def mount(self) -> None:
        done = subprocess.run(["mount", "--bind", self._what, self.at], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode()}")
        self.is_mounted = True

    def lose(self) -> None:
        subprocess.run(["umount", "--lazy", self.at], check=True)
        self.is_mounted = False


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    for name in ("a mount", "disk"):
        (tmp_path / name).mkdir()
    made = Mount(tmp_path / "a mount", tmp_path / "disk")
    made.mount()
    yield made
    if made.is_mounted:
        made.lose()


@pytest.mark.parametrize("name", [".", "run", "deeper/run"])
def test_a_lost_mount_fails_each_snapshot_until_it_is_back(name: str, mount: Mount) -> None:
    root = mount.at / name
    with ds.Checkpointer(root, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        mount.lose()
        for step in (2, 3):
            with pytest.raises(StorageError, match=r"the mount at .*/a mount is lost") as caught:
                ckpt.snapshot(providers(step), step=step).wait_committed()
            assert caught.value.filename == str(root.resolve() if name == "." else root)
        for look in (ckpt.latest, ckpt.steps, lambda: ckpt.restore(providers())):
            with pytest.raises(StorageError, match="is lost"):
                look()
        assert list(mount.at.iterdir()) == []
        mount.mount()
        ckpt.snapshot(providers(4), step=4).wait_committed()
        assert ckpt.steps() == [1, 4]


def test_what_was_saved_below_the_mount_is_not_restored(mount: Mount) -> None:
    mount.lose()
    with ds.Checkpointer(mount.at / "run", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(9), step=9)
    mount.mount()
    with ds.Checkpointer(mount.at / "run", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        mount.lose()
        with pytest.raises(StorageError, match="is another directory now: the mount at"):
            ckpt.restore(providers())
        with pytest.raises(StorageError, match="is another directory now: the mount at"):
            ckpt.snapshot(providers(), step=2).wait_committed()
        mount.mount()
    assert [path.name for path in (mount.at / "run").iterdir()] == ["step-00000001"]


def test_a_mount_that_is_lost_while_a_snapshot_is_written(mount: Mount) -> None:
    with ds.Checkpointer(mount.at / "run", on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        with held("sync"):
            snapshot = ckpt.snapshot(providers(2), step=2)
            snapshot.wait_captured()
            mount.lose()
        with pytest.raises(StorageError, match=r"the mount at .* is lost"):
            snapshot.wait_committed()
    assert list(mount.at.iterdir()) == []


def deleted(root: Path) -> None:
    shutil.rmtree(root)


def made_again(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def of_another_run(root: Path) -> None:
    made_again(root)
    other = DirectoryOpening(Location(root), fence._numbered(Location(root), "another process"), "another process")
    other.begin_to_save()


def moved(root: Path) -> None:
    root.rename(root.with_name("moved"))


def only_the_records(root: Path) -> None:
    shutil.rmtree(root / fence.FOLDER)


@pytest.mark.parametrize("change", [deleted, made_again, of_another_run, moved, only_the_records])
def test_a_directory_that_is_not_the_one_that_was_opened(change: Callable[[Path], None], tmp_path: Path) -> None:
    """torch.save and DCP write into whatever has the name."""
    root = tmp_path / "run"
    with ds.Checkpointer(root, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        change(root)
        before = sorted(root.iterdir()) if root.exists() else None
        with pytest.raises(StorageError, match=r"was deleted, moved or replaced. .* open it by a new Checkpointer"):
            ckpt.snapshot(providers(2), step=2).wait_committed()
        assert (sorted(root.iterdir()) if root.exists() else None) == before
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(3), step=3).wait_committed()
        assert ckpt.latest() == 3


def test_a_link_that_leads_elsewhere(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    root = tmp_path / "run"
    root.symlink_to("one")
    with ds.Checkpointer(root, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        root.unlink()
        root.symlink_to("two")
        with pytest.raises(StorageError, match="is another directory now"):
            ckpt.snapshot(providers(2), step=2).wait_committed()
        with pytest.raises(StorageError, match="is another directory now"):
            ckpt.restore(providers())
        assert list((tmp_path / "two").iterdir()) == []
        root.unlink()
        root.symlink_to(tmp_path / "one")
        ckpt.snapshot(providers(3), step=3).wait_committed()
        assert ckpt.steps() == [1, 3]


def test_a_directory_whose_number_changes_by_itself_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of some FUSE file systems do, and those of a mount that comes back."""
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        kind = type(store_of(Location(tmp_path)))
        real = kind.look
        monkeypatch.setattr(kind, "look", lambda *a, **k: (e := real(*a, **k)) and e._replace(place=(7, *e.place)))
        assert ckpt.latest() == 1
        ckpt.snapshot(providers(2), step=2).wait_committed()


def test_a_rank_whose_mount_is_lost_makes_nothing_below_it(mount: Mount) -> None:
    """The mount of one rank's machine: here the rank is told another path than the others."""
    (mount.at.parent / "disk" / "run").mkdir()
    roots = [mount.at.parent / "disk" / "run", mount.at / "run"]
    openings = [DirectoryOpening(Location(roots[0]), 1, "owner")]
    openings.append(DirectoryOpening.decode(Location(roots[1]), openings[0].encode()))
    openings[0].begin_to_save()
    openings[1].refuse_elsewhere()
    mount.lose()
    (mount.at / "run").mkdir()
    with pytest.raises(StorageError, match=r"the mount at .* is lost"):
        openings[1].refuse_elsewhere()
    openings[0].refuse_if_fenced()
    (mount.at / "run").rmdir()


def test_several_ranks_prove_the_place(tmp_path: Path) -> None:
    """All of them raise, and none makes a folder."""
    root = tmp_path / "run"

    def rank(number: int) -> list[str]:
        said = []
        where = {"rank": number, "world_size": 2, "rank_timeout": 30}
        with ds.Checkpointer(root, on_error="warn", **OPTIONS, **where) as ckpt:
            state = [ReplicatedProvider(one, range(2)) for one in providers(1)]
            ckpt.snapshot(state, step=1).wait_committed()
            ckpt.restore(state)
            if number == 0:
                (root / fence.FOLDER).rename(tmp_path / "records")
            ckpt.restore(state)
            try:
                ckpt.snapshot(state, step=2).wait_committed()
            except ds.DatastatesError as error:
                said.append(str(error))
        return said

    with ThreadPoolExecutor(2) as pool:
        told = [text for said in pool.map(rank, range(2)) for text in said]
    assert len(told) == 2
    assert all("was deleted, moved or replaced" in text for text in told)
    assert [path.name for path in root.glob("step-*")] == ["step-00000001"]


def single(folder: Path, name: str) -> None:
    ds.snapshot(providers(), folder / name, **OPTIONS).wait_committed()


def exported(folder: Path, name: str) -> None:
    source = folder.parents[1] / "source"
    if not source.exists():
        ds.snapshot(providers(), source, **OPTIONS).wait_committed()
    ds.export(source, folder / name / "model.safetensors")


def by_dcp(folder: Path, name: str) -> None:
    pytest.importorskip("torch")
    import torch
    import torch.distributed.checkpoint as dcp

    from datastates.adapters.dcp import DataStatesStorageWriter

    dcp.save({"a": torch.ones(3)}, storage_writer=DataStatesStorageWriter(folder / name, **OPTIONS), no_dist=True)


def as_folder(folder: Path, name: str) -> None:
    """As accelerate's and the Trainer's."""
    pytest.importorskip("torch")
    from datastates.adapters.shared.folders import FolderCheckpoints
    from datastates.files.settings import FolderSettings

    folders = FolderCheckpoints(FolderSettings.of({}), "test")
    try:
        folders.save(folder / name, lambda staged, _: (staged / "a").touch())
    finally:
        folders.close()


def by_lightning(folder: Path, name: str) -> None:
    pytest.importorskip("lightning")
    from datastates.adapters.lightning import DataStatesCheckpointIO

    plugin = DataStatesCheckpointIO(**OPTIONS)
    plugin.save_checkpoint({"a": 1}, folder / name / "a.ckpt")
    plugin.teardown()


@pytest.mark.parametrize("save", [single, exported, by_dcp, as_folder, by_lightning])
def test_other_saves_make_no_folder_below_a_lost_mount(save: Callable[[Path, str], None], mount: Mount) -> None:
    home = mount.at / "home"
    save(home, "first")
    shutil.rmtree(home)
    save(home, "made again")  # as torch's own savers do
    mount.lose()
    for folder in (home, mount.at / "another"):
        with pytest.raises(BaseException, match=r"the mount at .*/a mount is lost"):  # DCP wraps the error
            save(folder, "second")
    assert list(mount.at.iterdir()) == []
    mount.mount()
    save(home, "third")


def test_a_folder_below_a_lost_mount_counts_as_lost_also_if_it_is_there(mount: Mount) -> None:
    mount.lose()
    (mount.at / "home").mkdir()
    mount.mount()
    home = Location(mount.at / "home")
    store_of(home).make_folder(home)
    store_of(home).make_folder(home)
    mount.lose()
    with pytest.raises(StorageError, match=r"the mount at .*/a mount is lost"):
        store_of(home).make_folder(home)
