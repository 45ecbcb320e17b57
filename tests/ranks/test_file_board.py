"""A board in a directory, on file systems that keep less than a disk does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from datastates.errors import UnreachableError
from datastates.ranks.join import FileBoard
from datastates.storage import Location
from datastates.storage.local import LocalStore


def boards(run: Path) -> list[FileBoard]:
    run.mkdir()
    return [FileBoard(Location(run), rank, lambda: None) for rank in range(3)]


def test_the_first_claim_stands(tmp_path: Path) -> None:
    zero, one, two = boards(tmp_path / "run")
    assert [one.claim("gate"), zero.claim("gate"), two.claim("gate"), one.claim("gate")] == [1] * 4
    assert two.claim("another") == 2
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_a_claim_needs_no_file_to_outlive_a_rename(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on rclone: it uploads an empty file after it was closed, and by then its folder may have another name."""

    real = LocalStore.rename

    def rename(store: LocalStore, source: Location, target: Location) -> None:
        real(store, source, target)
        for file in Path(target).iterdir():
            if file.is_file() and not file.stat().st_size:
                file.unlink()

    monkeypatch.setattr(LocalStore, "rename", rename)
    zero, one, _ = boards(tmp_path / "run")
    assert [zero.claim("gate"), one.claim("gate")] == [0, 0]


def test_a_claim_in_a_run_that_has_ended_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rename(store: LocalStore, source: Location, target: Location) -> None:
        os.rename(source, target)
        shutil.rmtree(tmp_path / "run")  # as rank 0 does when it closes

    monkeypatch.setattr(LocalStore, "rename", rename)
    with pytest.raises(UnreachableError, match="rank 0 has closed this run"):
        boards(tmp_path / "run")[1].claim("gate")
