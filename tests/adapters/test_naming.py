"""A folder takes a name that another folder has: what others have written there stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datastates.errors import CommitError

naming = pytest.importorskip("datastates.adapters.naming")


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


def test_a_file_and_the_working_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CommitError, match="file is a file"):
        naming.refuse(tmp_path / "file")
    monkeypatch.chdir(folder(tmp_path / "here"))
    with pytest.raises(CommitError, match="working directory"):
        naming.refuse(tmp_path)
    with pytest.raises(CommitError, match="mount point"):
        naming.refuse(Path("/"))
