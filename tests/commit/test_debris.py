"""What is debris: a lock that can be taken does not prove that nobody writes, and who only reads deletes nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hold import held

import datastates as ds
from datastates._base import process
from datastates.commit import directory_tier, names
from datastates.commit.fence import DirectoryOpening
from datastates.commit.names import LOCK, partial
from datastates.commit.tiers import tier_of
from datastates.errors import FencedError
from datastates.providers import HostTensorProvider
from datastates.storage import Location
from datastates.storage.local import LocalStore

OPTIONS = {"host_cache": "2MiB", "block": "1MiB"}
DAY = 24 * 3600
LOOK = """
import sys
import numpy as np
import datastates as ds
from datastates.providers import HostTensorProvider
from datastates.storage.local_files import LocalLock
if sys.argv[2] == "blind":  # as where each of two mounts keeps its locks to itself
    LocalLock.hold = lambda lock, shared=False: True
live = {"a": np.zeros(10)}
with ds.Checkpointer(sys.argv[1], host_cache="2MiB", block="1MiB") as ckpt:
    assert ckpt.restore([HostTensorProvider("model", live)]).step == live["a"][0] == ckpt.latest()
    if sys.argv[3] == "save":
        live["a"][:] = 7
        ckpt.snapshot([HostTensorProvider("model", live)], step=7)
"""


def providers(value: float) -> list[HostTensorProvider]:
    return [HostTensorProvider("model", {"a": np.full(10, float(value))})]


def look(root: Path, *, blind: bool, then: str = "close") -> None:
    word = "blind" if blind else "shared"
    subprocess.run([sys.executable, "-c", LOOK, root, word, then], cwd="/", check=True)


@pytest.fixture
def two_mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two mounts of one folder that do not see each other's locks."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    for name in ("real", "first", "second"):
        (tmp_path / name).mkdir()
    mounted = []
    for name in ("first", "second"):
        done = subprocess.run(["bindfs", tmp_path / "real", tmp_path / name], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode()}")
        mounted.append(tmp_path / name)
    yield tmp_path / "first", tmp_path / "second"
    for path in mounted:
        subprocess.run(["umount", "--lazy", path], check=True)


def save_while(root: Path, other: Path, *, blind: bool) -> None:
    """Another process opens the directory, restores and closes while a snapshot is written."""
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        with held("sync"):
            snapshot = ckpt.snapshot(providers(2), step=2)
            snapshot.wait_captured()
            look(other, blind=blind)
        snapshot.wait_committed()
    assert ds.load(root)["model"]["a"][0] == 2


def test_who_only_reads_deletes_nothing(tmp_path: Path) -> None:
    save_while(tmp_path, tmp_path, blind=True)


@pytest.mark.long
def test_who_only_reads_through_another_mount_deletes_nothing(two_mounts: tuple[Path, Path]) -> None:
    first, second = two_mounts
    save_while(first / "run", second / "run", blind=False)
    save_while(first.parent / "real" / "beside", second / "beside", blind=False)


def test_who_saves_through_another_mount_fences_first(two_mounts: tuple[Path, Path]) -> None:
    first, second = two_mounts
    with ds.Checkpointer(first / "run", on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        with held("sync"):
            fenced = ckpt.snapshot(providers(2), step=2)
            fenced.wait_captured()
            look(second / "run", blind=False, then="save")
        with pytest.raises(FencedError):
            fenced.wait_committed()
    assert ds.load(first / "run")["model"]["a"][0] == 7
    assert sorted(path.name for path in (first / "run").glob("step-*")) == ["step-00000001", "step-00000007"]


def test_debris_is_removed_by_the_first_snapshot_not_by_the_opening(tmp_path: Path) -> None:
    left = written(tmp_path, ended_process())
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        assert ckpt.restore(providers(0)) is None
        assert left.exists()
        ckpt.snapshot(providers(1), step=1)
    assert not left.exists()


def ended_process() -> str:
    script = "from datastates._base.process import own_name; print(own_name())"
    return subprocess.run(
        [sys.executable, "-c", script], cwd="/", check=True, capture_output=True, text=True
    ).stdout.strip()


def written(root: Path, named: str, number: int = 0, owner: str = "-", step: int = 5) -> Path:
    """A partial directory that a process of that name writes, or has written, without a lock that is seen here."""
    left = Path(partial(Location(root / f"step-{step:08}"), f"{number:08x}"))
    left.mkdir(parents=True)
    (left / LOCK).write_text(f"{number} {owner} {named}\n")
    (left / "rank-00000.pt").write_bytes(b"half")
    return left


def age(left: Path, seconds: float) -> None:
    for path in (*left.rglob("*"), left):
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


def test_what_a_process_of_this_host_left_is_debris_once_it_has_ended(tmp_path: Path) -> None:
    left = written(tmp_path, ended_process())
    assert tier_of(tmp_path).debris() == [left]
    (left / LOCK).write_text(f"0 - {ended_process()}\n0 - {process.own_name().replace('/', 'x/')}\n")
    assert tier_of(tmp_path).debris() == []  # another rank, on another host, may live


def test_what_another_host_writes_is_debris_once_it_has_stood_still_for_a_day(tmp_path: Path) -> None:
    left = written(tmp_path, "another-boot:4026531836/1:2")
    assert tier_of(tmp_path).debris() == []
    age(left, 1.1 * DAY)
    (left / "rank-00000.pt").write_bytes(b"more")
    age(left, 0)
    assert tier_of(tmp_path).debris() == []
    age(left, 1.1 * DAY)
    assert tier_of(tmp_path).debris() == [left]
    tier_of(tmp_path).sweep()
    assert list(tmp_path.iterdir()) == []


def test_what_a_fenced_opening_writes_is_debris(tmp_path: Path) -> None:
    elsewhere = "another-boot:4026531836/1:2"
    older, newer = (DirectoryOpening(tmp_path, n, owner) for n, owner in ((1, "older"), (2, "newer")))
    left = [written(tmp_path, elsewhere, n, o, step) for step, (n, o) in enumerate([(1, "older"), (2, "newer")])]
    older.begin_to_save()
    assert tier_of(tmp_path).debris() == []
    newer.begin_to_save()
    (found,) = tier_of(tmp_path).debris()  # under another name
    assert (found.stem, left[1].exists()) == (left[0].stem, True)
    assert names.decode((Path(found) / LOCK).read_bytes()) == [names.Writer(1, "older", elsewhere)]


@pytest.mark.long
@pytest.mark.parametrize("content", [b"", b"left over", b"12 \xff\n", b"9" * 50])
def test_a_lock_file_that_says_nothing_names_nobody(content: bytes, tmp_path: Path) -> None:
    left = written(tmp_path, ended_process())
    (left / LOCK).write_bytes(content)
    assert tier_of(tmp_path).debris() == []


def test_a_directory_that_is_locked_in_a_moment_is_left_alone(tmp_path: Path) -> None:
    """Its writer has made it, and is about to make the lock file."""
    made = Path(partial(Location(tmp_path / "step-00000001"), "0123abcd"))
    made.mkdir()
    real = directory_tier._locked

    @contextlib.contextmanager
    def locked(entry: Location) -> Iterator[directory_tier._Lock]:
        with real(entry) as found:
            (made / LOCK).touch()
            yield found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(directory_tier, "_locked", locked)
        directory_tier._clear(Location(made))
    assert (made / LOCK).exists()


def test_a_deletion_of_this_process_is_no_debris(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deleting, go_on = threading.Event(), threading.Event()
    real = directory_tier._clear

    def slow(left: Location) -> None:
        deleting.set()
        assert go_on.wait(30)
        real(left)

    with pytest.MonkeyPatch.context() as patched, ds.Checkpointer(tmp_path, keep_last=1, **OPTIONS) as ckpt:
        patched.setattr(directory_tier, "_clear", slow)
        for step in (1, 2):
            ckpt.snapshot(providers(step), step=step)
        assert deleting.wait(30)
        with ds.Checkpointer(tmp_path, **OPTIONS) as other:
            other.snapshot(providers(3), step=3).wait_committed()
        go_on.set()
    assert "debris" not in caplog.text


def test_what_is_deleted_during_its_commit_was_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = Location(tmp_path / "step-00000001"), LocalStore.names

    def names(store: LocalStore, folder: Location, **options: Any) -> list[str]:
        if folder == path and store.exists(path / "manifest.json"):
            assert directory_tier.DirectoryTier(path.parent).remove(path)  # as of a snapshot that was taken later
            return []
        return real(store, folder, **options)

    monkeypatch.setattr(LocalStore, "names", names)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        taken = ckpt.snapshot(providers(1), step=1)
        taken.wait_committed()
    assert taken.path == tmp_path / "step-00000001"
    assert not taken.path.exists()


def test_whether_a_process_is_gone() -> None:
    assert not process.is_gone(process.own_name())
    assert process.is_gone(ended_process())
    kernel, _, own = process.own_name().partition("/")
    assert process.is_gone(f"{kernel}/{own.partition(':')[0]}:1"), "its number was given to another process"
    for unknown in ("", "?", f"x{kernel}/1:2", f"{kernel}/one:2"):
        assert not process.is_gone(unknown)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    zombie = f"{kernel}/{child}:{process._start(child)}"
    assert not process.is_gone(zombie)
    os.close(read)
    os.close(write)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.is_gone(zombie)
    os.waitpid(child, 0)
