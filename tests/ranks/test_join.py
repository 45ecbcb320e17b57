"""A rank writes its hello file into a folder that other ranks make and delete."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastates.errors import StorageError
from datastates.ranks import join
from datastates.storage import Location, store_of


def test_a_folder_that_is_deleted_once_it_was_found_to_exist_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.mkdir, []

    def mkdir(path: Any, *arguments: Any) -> None:
        if os.fspath(path).endswith(join.FOLDER) and not refused:
            refused.append(path)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        real(path, *arguments)

    monkeypatch.setattr(os, "mkdir", mkdir)
    hello = tmp_path / join.FOLDER / "hello-0-2-ab"
    join._say_hello(hello, 5)
    assert refused
    assert hello.exists()


@pytest.mark.parametrize(
    "make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["file", "pipe", "dangling link"]
)
def test_what_is_no_folder_in_its_place_is_an_error(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / join.FOLDER)
    with pytest.raises(StorageError, match="Not a directory"):
        join._say_hello(tmp_path / join.FOLDER / "hello-0-2-ab", 5)


def test_a_folder_that_is_deleted_again_and_again_is_waited_for_no_longer_than_for_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Any, *_: Any) -> None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(StorageError, match="File exists"):
        join._say_hello(tmp_path / join.FOLDER / "hello-0-2-ab", 0.05)


def test_a_run_that_has_just_ended_may_delete_the_folder_before_rank_0_begins(tmp_path: Path) -> None:
    root = Location(tmp_path / join.FOLDER)
    run, lock = join._gather(root, 1, 5)
    lock.close()
    assert store_of(root).is_folder(root / run)
