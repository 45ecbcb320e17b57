"""Making directories that other ranks make at the same time, and renames that replace nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

import datastates as ds
from datastates._base import faults
from datastates._base.sizes import PAGE
from datastates.errors import StorageError
from datastates.storage import Location, local, store_of


def test_another_rank_makes_the_directory_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    def hit(point: str, name: str) -> None:
        if point == "store.mkdir":
            Path(name).mkdir()
            made.append(name)

    monkeypatch.setattr(faults, "is_armed", lambda: True)
    monkeypatch.setattr(faults, "hit", hit)
    store_of(tmp_path).make_folder(tmp_path / "a" / "b")
    assert made == [str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_another_rank_deletes_the_directory_that_was_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, tried = os.mkdir, list[str]()

    def mkdir(path: Any, *mode: int) -> None:
        tried.append(os.fspath(path))
        if len(tried) == 1:  # another rank's is there, and is gone before it is looked at
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        real(path, *mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    store_of(tmp_path).add_folder(tmp_path / "a", exist_ok=True)
    assert tried == [str(tmp_path / "a")] * 2
    assert (tmp_path / "a").is_dir()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(StorageError) as caught:
        store_of(tmp_path).make_folder(tmp_path / "a" / "b")
    assert caught.value.errno == errno.ENOTDIR
    assert str(tmp_path / "a") in str(caught.value)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.EIO, errno.ERANGE, errno.ENOTTY])
@pytest.mark.parametrize("lacking", [(), ("noreplace",), ("noreplace", "link")])
def test_a_file_gets_a_name_that_is_free_or_none(
    lacking: tuple[str, ...], number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "not offered")

    if lacking:
        monkeypatch.setattr(local, "_rename_noreplace", refuse)
    if "link" in lacking:
        monkeypatch.setattr(os, "link", refuse)
    for name in ("new", "other"):
        (tmp_path / name).write_text(name)
    with pytest.raises(StorageError, match="other") as caught:
        store_of(tmp_path).rename_new(tmp_path / "new", tmp_path / "other")
    assert (caught.value.errno, caught.value.operation) == (errno.EEXIST, "rename")
    assert (tmp_path / "other").read_text() == "other"
    store_of(tmp_path).rename_new(tmp_path / "new", tmp_path / "free")
    assert sorted(os.listdir(tmp_path)) == ["free", "other"]
    with pytest.raises(StorageError) as caught:
        store_of(tmp_path).rename_new(tmp_path / "new", tmp_path / "gone")
    assert caught.value.errno == errno.ENOENT


def test_a_name_that_cannot_be_looked_at_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "new").write_text("new")
    (tmp_path / "other").write_text("other")
    with monkeypatch.context() as patched:
        for name in ("link", "stat"):
            patched.setattr(os, name, refuse)
        patched.setattr(local, "_rename_noreplace", refuse)
        with pytest.raises(StorageError) as caught:
            store_of(tmp_path).rename_new(tmp_path / "new", tmp_path / "other")
    assert caught.value.errno == errno.EIO
    assert (tmp_path / "other").read_text() == "other"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTTY, errno.EIO, errno.ENOSPC])
def test_a_folder_that_is_not_synced_alone_is_synced_with_its_file_system(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[str] = []

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def call(name: str, *_: object) -> int:
        called.append(name)
        return answer

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(local, "_call_libc", call)
    for answer in (0, errno.EBADF):
        if answer == 0 and number not in (errno.EIO, errno.ENOSPC):
            store_of(tmp_path).sync_folder(tmp_path)
            continue
        with pytest.raises(StorageError) as caught:
            store_of(tmp_path).sync_folder(tmp_path)
        assert (caught.value.errno, caught.value.operation) == (number, "sync_directory")
    assert called == ([] if number in (errno.EIO, errno.ENOSPC) else ["syncfs", "syncfs"])


@pytest.mark.parametrize("length", [0, 3, 4096])
@pytest.mark.parametrize("direct", [False, True])
def test_a_file_of_another_length_than_written_is_refused(direct: bool, length: int, tmp_path: Path) -> None:
    path = Location(tmp_path / "file")
    with contextlib.closing(store_of(path).writer(path, direct=direct)) as writer:
        writer.write(b"12345", 0)
        os.truncate(path, length)
        with pytest.raises(
            StorageError, match=f"has {length} bytes after 5 were written and synced: its file"
        ) as caught:
            writer.finish()
    assert (caught.value.errno, caught.value.operation, caught.value.filename) == (errno.EIO, "write", str(path))


def test_a_new_file_of_another_length_than_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, sync = Location(tmp_path / "file"), os.fsync

    def lengthen(fd: int) -> None:
        sync(fd)
        os.truncate(path, 4096)

    monkeypatch.setattr(os, "fsync", lengthen)
    with pytest.raises(StorageError, match="has 4096 bytes after 5 were written"):
        store_of(path).create(path, b"12345")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.EIO, errno.ENOSPC])
def test_direct_io_that_is_refused_late_goes_on_through_the_cache(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, pwrite, refused = Location(tmp_path / "file"), os.pwrite, []

    def write(fd: int, data: bytes, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(number, os.strerror(number))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with contextlib.closing(store_of(path).writer(path, direct=True)) as writer:
        if number in (errno.EIO, errno.ENOSPC):
            with pytest.raises(StorageError) as caught:
                writer.write(bytes(3 * PAGE), 0)
            assert (caught.value.errno, caught.value.operation) == (number, "write")
            return
        for page in range(3):
            writer.write(bytes([page]) * PAGE, page * PAGE)
        writer.finish()
    assert refused == [0]
    assert Path(path).read_bytes() == b"".join(bytes([page]) * PAGE for page in range(3))


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "good").symlink_to("real")
    (tmp_path / "loose").symlink_to("nowhere")
    store, place = store_of(Location(tmp_path)), Location(tmp_path)
    store.add_folder(place / "good", exist_ok=True)
    with pytest.raises(StorageError) as caught:
        store.add_folder(place / "loose", exist_ok=True)
    assert caught.value.errno == errno.ENOTDIR


def test_a_mount_that_was_lost_is_no_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stale(path: Location) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    place = Location(tmp_path)
    with ds.Checkpointer(tmp_path) as checkpointer, monkeypatch.context() as patched:
        patched.setattr(os, "listdir", stale)
        patched.setattr(os, "scandir", stale)
        for look in (checkpointer.latest, checkpointer.steps, lambda: store_of(place).names(place)):
            with pytest.raises(StorageError) as caught:
                look()
            assert caught.value.errno == errno.ESTALE
        assert store_of(place).names(place, stale_ok=True) == []


@pytest.mark.parametrize("call", ["stat", "fstat"])
def test_a_lock_whose_file_cannot_be_looked_at(call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = Location(tmp_path / "a")
    number = errno.EIO

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with store_of(path).open_lock(path, create=b"") as lock, monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(StorageError) as caught:
            lock.is_at(path)
        assert (caught.value.errno, caught.value.operation, caught.value.filename) == (errno.EIO, "stat", str(path))
        number = errno.ESTALE  # NFS reports it of a file that another machine has deleted
        assert not lock.is_at(path)
