"""Making directories that other ranks make at the same time."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from datastates._base import files
from datastates.errors import StorageError


def test_another_rank_makes_the_directory_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    def hit(point: str, name: str) -> None:
        if point == "manifest.mkdir":
            Path(name).mkdir()
            made.append(name)

    monkeypatch.setattr(files.faults, "hit", hit)
    files.make_directory(tmp_path / "a" / "b")
    assert made == [str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(StorageError) as caught:
        files.make_directory(tmp_path / "a" / "b")
    assert caught.value.errno == errno.ENOTDIR
    assert str(tmp_path / "a") in str(caught.value)
