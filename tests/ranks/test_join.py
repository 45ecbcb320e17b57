"""A rank writes its hello file into a folder that other ranks make and delete."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from datastates.errors import StorageError
from datastates.ranks import join


def test_a_folder_that_is_deleted_once_it_was_found_to_exist_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = Path.mkdir, []

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == join.FOLDER and not refused:
            refused.append(path)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    hello = tmp_path / join.FOLDER / "hello-0-2-ab"
    join._say_hello(hello)
    assert refused
    assert hello.exists()


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / join.FOLDER).write_text("theirs")
    with pytest.raises(StorageError, match="File exists"):
        join._say_hello(tmp_path / join.FOLDER / "hello-0-2-ab")
