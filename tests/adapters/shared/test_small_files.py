"""A failure to write a framework's small files names the path and the reason."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Any

import pytest

from datastates.errors import StorageError

torch = pytest.importorskip("torch")
small_files = pytest.importorskip("datastates.adapters.shared.small_files")

FULL = Path("/dev/full")


def test_torch_s_own_error_names_neither(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as told:
        torch.save({"a": 1}, FULL)
    assert not isinstance(told.value, OSError)
    assert str(FULL) not in str(told.value)


def test_a_full_disk_is_told_with_path_and_reason(tmp_path: Path) -> None:
    with (
        small_files.written(FULL.parent, tmp_path, None, whole=False),
        pytest.raises(StorageError, match="No space left") as told,
    ):
        torch.save({"a": 1}, FULL)
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, str(FULL))


def test_a_failure_is_kept_and_what_follows_goes_on(tmp_path: Path) -> None:
    failed: list[OSError] = []
    with small_files.written(FULL.parent, tmp_path, failed, whole=False):
        torch.save({"a": 1}, FULL)
        torch.save({"a": 1}, str(FULL))
        went_on = True
    assert went_on
    assert [error.errno for error in failed] == [errno.ENOSPC] * 2


def test_a_system_call_that_names_no_path_gets_the_checkpoint_s(tmp_path: Path) -> None:
    def fill() -> None:
        with FULL.open("w") as file:
            file.write("x")

    with pytest.raises(OSError, match="No space left") as stock:
        fill()
    assert stock.value.filename is None
    with pytest.raises(StorageError, match="No space left") as told, small_files.collected(tmp_path, None):
        fill()
    assert told.value.filename == str(tmp_path)


def test_what_is_no_failure_of_storage_is_raised_as_it_is(tmp_path: Path) -> None:
    failed: list[OSError] = []
    with pytest.raises(AttributeError), small_files.written(tmp_path, tmp_path, failed, whole=False):
        torch.save(lambda: 1, tmp_path / "a")
    assert failed == []


def test_safetensors_own_error_is_one_of_storage(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    failed: list[OSError] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with small_files.collected(tmp_path, failed):
            save_file({"a": torch.zeros(10000)}, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (error,) = failed
    assert (error.errno, error.filename) == (errno.EFBIG, str(tmp_path))


def test_where_other_ranks_wait_only_torch_s_save_goes_on(tmp_path: Path) -> None:
    failed: list[OSError] = []

    def write() -> None:
        with small_files.written(FULL.parent, tmp_path, failed, whole=True):
            torch.save({"a": 1}, FULL)
            (FULL / "file").write_text("x")

    with pytest.raises(NotADirectoryError):
        write()
    assert [error.errno for error in failed] == [errno.ENOSPC]


def test_other_files_are_torch_s(tmp_path: Path) -> None:
    place: Any = tmp_path / "there"
    with small_files.written(tmp_path / "here", tmp_path, None, whole=False):
        torch.save({"a": 1}, place)
    assert torch.load(place, weights_only=True) == {"a": 1}
