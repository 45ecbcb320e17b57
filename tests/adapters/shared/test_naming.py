"""A folder takes a name that another folder has: what others have written there stays."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datastates.commit.names import stem_of_partial
from datastates.errors import CommitError, StorageError
from datastates.storage import Location
from datastates.storage.local import LocalStore

naming = pytest.importorskip("datastates.adapters.shared.naming")


def folder(root: Path, **texts: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (root / name).write_text(text)
    return root


def texts(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("replace", [False, True])
def test_what_was_there_gives_way_and_what_came_later_does_not(replace: bool, tmp_path: Path) -> None:
    final = folder(tmp_path / "final", model="old", notes="old")
    folder(final / "empty")
    before = naming.contents(final)
    staged = folder(tmp_path / ".final.partial-00000000" / "final", model="new", state="new")
    folder(final / "deep", later="later")
    (final / "state").write_text("later")
    os.symlink("deep", final / "link")
    naming.publish(staged, final, before, replace=replace)
    expected = {"deep/later": "later", "model": "new", "state": "later"}
    assert texts(final) == expected | ({} if replace else {"notes": "old"})
    assert os.readlink(final / "link") == "deep"
    assert (final / "empty").exists() != replace
    assert list(tmp_path.iterdir()) == [final]


def test_a_file_system_that_loses_files_of_a_renamed_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lose(store: LocalStore, source: Location, target: Location) -> None:
        os.rename(source, target)
        for name in store.names(target):
            Path(target / name).write_bytes(b"")

    monkeypatch.setattr(LocalStore, "rename", lose)
    final = folder(tmp_path / "final", model="old")
    staged = folder(tmp_path / ".final.partial-00000000" / "final", model="new")
    with pytest.raises(StorageError, match="lost as the folder around it is renamed"):
        naming.publish(staged, final, naming.contents(final), replace=True)
    assert texts(tmp_path) == {"final/model": "old", ".final.partial-00000000/final/model": "new"}


def test_what_is_written_beside_it_is_moved_beside_it(tmp_path: Path) -> None:
    staged = folder(tmp_path / ".final.partial-00000000" / "final", model="new")
    folder(staged.parent / "projector", weights="x")
    folder(tmp_path / "projector", others="y")
    (staged.parent / "log").write_text("z")
    naming.publish(staged, tmp_path / "final", {}, replace=False)
    assert texts(tmp_path) == {"final/model": "new", "log": "z", "projector/others": "y", "projector/weights": "x"}


def test_what_a_killed_run_had_moved_aside_is_put_back(tmp_path: Path) -> None:
    hidden = tmp_path / ".step-3.partial-00000000"
    folder(hidden / "old" / "step-3", model="old")
    folder(hidden / "step-3", model="new")
    naming.sweep(tmp_path, naming.alike("step-7"), tmp_path)
    assert texts(tmp_path) == {"step-3/model": "old"}


@pytest.mark.parametrize("numbers", [("3", "7"), ("9", "10"), ("7", "7")])
def test_a_long_name_is_put_back_too(numbers: tuple[str, str], tmp_path: Path) -> None:
    left, new = (f"step-{number}-{'x' * 225}-{number}-end" for number in numbers)
    stem = stem_of_partial(f".{left}")
    assert stem != f".{left}"
    hidden = tmp_path / f"{stem}.partial-00000000"
    folder(hidden / "old" / left, model="old")
    folder(hidden / left, model="new")
    folder(tmp_path / f"{stem_of_partial('.other-' + 'x' * 240)}.partial-00000000")
    naming.sweep(tmp_path, naming.alike(new), tmp_path)
    assert texts(tmp_path) == {f"{left}/model": "old"}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_long_name_of_a_file_in_it_is_kept(tmp_path: Path) -> None:
    name = "x" * 255
    final = folder(tmp_path / "final", **{name: "notes"})
    staged = folder(tmp_path / ".final.partial-00000000" / "final", model="new")
    naming.publish(staged, final, naming.contents(final), replace=False)
    assert texts(final) == {"model": "new", name: "notes"}


def test_what_a_run_had_published_before_it_was_killed_stays(tmp_path: Path) -> None:
    hidden = tmp_path / ".step-3.partial-00000000"
    folder(hidden / "old" / "step-3", model="old")
    naming.sweep(tmp_path, naming.alike("step-7"), tmp_path)  # and step-3 was deleted since
    assert texts(tmp_path) == {}


def _fixed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no rename move a folder, as of a lower layer of overlayfs."""
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source == path and path.exists():
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)


def test_a_folder_that_cannot_be_renamed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = folder(tmp_path / "final", model="old", notes="old")
    folder(final / "deep", inner="old")
    before = naming.contents(final)
    staged = folder(tmp_path / ".final.partial-00000000" / "final", model="new")
    (final / "later").write_text("later")
    _fixed(final, monkeypatch)
    naming.publish(staged, final, before, replace=False)
    assert texts(tmp_path) == {
        f"final/{name}": text
        for name, text in {"model": "new", "notes": "old", "later": "later", "deep/inner": "old"}.items()
    }


@pytest.mark.parametrize("fails", ["copytree", "rmtree"])
def test_when_that_fails_nothing_is_lost(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = folder(tmp_path / "final", model="old", notes="old")
    staged = folder(tmp_path / ".final.partial-00000000" / "final", model="new")
    _fixed(final, monkeypatch)

    def fail(path: Path, *_: object, **__: object) -> None:
        if path == final:
            if fails == "rmtree":
                (final / "model").unlink()
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, fails, fail)
        with pytest.raises(OSError, match="Input/output"):
            naming.publish(staged, final, naming.contents(final), replace=False)
    assert texts(final) == {"model": "old", "notes": "old"}


def test_a_move_that_was_killed_is_undone(tmp_path: Path) -> None:
    hidden = tmp_path / ".final.partial-00000000"
    folder(hidden / "old" / "final", model="old", notes="old")
    folder(hidden / "final", model="new")
    folder(tmp_path / "final", notes="old")  # the rest of what is removed
    naming.sweep(tmp_path, naming.alike("final"), tmp_path)
    assert texts(tmp_path) == {"final/model": "old", "final/notes": "old"}


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Mounts an overlay over the folder ``lower``; the layers lie in a tmpfs."""
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode()}")

    def mount() -> Path:
        for name in ("upper", "work", "merged"):
            (tmp_path / name).mkdir()
        options = ",".join(f"{kind}dir={tmp_path / kind}" for kind in ("lower", "upper", "work"))
        command = ["mount", "-t", "overlay", "overlay", "-o", options, tmp_path / "merged"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no overlay can be mounted here: {done.stderr.decode()}")
        return tmp_path / "merged"

    yield mount
    subprocess.run(["umount", tmp_path / "merged"], capture_output=True, check=False)
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_checkpoint_of_an_image_is_replaced(layers: Callable[[], Path], tmp_path: Path) -> None:
    folder(tmp_path / "lower" / "final", model="old", notes="old")
    final = layers() / "final"
    before = naming.contents(final)
    staged = folder(final.parent / ".final.partial-00000000" / "final", model="new")
    naming.publish(staged, final, before, replace=False)
    assert texts(final.parent) == {"final/model": "new", "final/notes": "old"}


def test_a_file_and_the_working_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CommitError, match="file is a file"):
        naming.refuse(tmp_path / "file")
    monkeypatch.chdir(folder(tmp_path / "here"))
    with pytest.raises(CommitError, match="working directory"):
        naming.refuse(tmp_path)
    with pytest.raises(CommitError, match="mount point"):
        naming.refuse(Path("/"))
