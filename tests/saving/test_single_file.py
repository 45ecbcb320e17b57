"""Single container files, whose name and top level the caller chooses."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates as ds
from datastates import _native
from datastates.config import IoSettings
from datastates.container.file import open_container
from datastates.errors import CorruptError, StorageError
from datastates.executor.make import make_executor
from datastates.formats import own
from datastates.reading import whole_checkpoint
from datastates.reading.stored import Stored
from datastates.storage import Location

SETTINGS = IoSettings(host_cache="8MiB", block="1MiB")


def state() -> dict[Any, Any]:
    flat = torch.arange(4096, dtype=torch.float32)
    return {
        "module": OrderedDict(a=flat[:1000].view(10, 100), b=flat[1000:]),
        3: {"array": np.arange(5), "text": "ä"},
        "tied": flat[:1000].view(10, 100),
    }


def test_it_is_the_value_for_torch_and_for_this_package(tmp_path: Path, write_file: Any) -> None:
    path = tmp_path / "of_another_name.pt"
    snapshot = write_file(path, state())
    assert snapshot.committed
    assert snapshot.path == path
    assert snapshot.step == 0
    for found in (torch.load(path, weights_only=False), ds.load(path)):
        assert list(found) == ["module", 3, "tied"]
        assert type(found["module"]) is OrderedDict
        assert torch.equal(found["module"]["b"], state()["module"]["b"])
        assert found["tied"].data_ptr() == found["module"]["a"].data_ptr()
        assert found[3]["text"] == "ä"
        assert (found[3]["array"] == np.arange(5)).all()
    assert list(tmp_path.iterdir()) == [path]
    assert list(own.verify_container(open_container(path), lambda _: None)) == []


@pytest.mark.parametrize("more", [{}, {"set": {1}}], ids=["plain", "of other values"])
def test_its_top_level_keeps_its_class_and_attributes(tmp_path: Path, write_file: Any, more: dict[str, Any]) -> None:
    value: Any = OrderedDict(w=torch.ones(3), **more)
    value._metadata = OrderedDict({"": {"version": 1}})
    write_file(tmp_path / "file.pt", value)
    for found in (torch.load(tmp_path / "file.pt", weights_only=False), ds.load(tmp_path / "file.pt")):
        assert type(found) is OrderedDict
        assert found._metadata == value._metadata


def test_single_tensors_are_read_and_named(tmp_path: Path, write_file: Any) -> None:
    path = tmp_path / "file.pt"
    write_file(path, state())
    with ds.open(path) as opened:
        assert (np.asarray(opened["file/module/b"]) == np.arange(1000, 4096)).all()
    data = bytearray(path.read_bytes())
    at = data.index(np.float32(1234).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"file/module/a|file/module/b"):
        ds.load(path)


def test_its_memory_may_be_placed_elsewhere(tmp_path: Path, write_file: Any) -> None:
    path = tmp_path / "file.pt"
    write_file(path, state())
    placed: list[Any] = []

    def place(block: Any) -> Any:
        placed.append(torch.full_like(block, 255))
        return placed[-1]

    stored = Stored.of_file(Location(path))
    found: Any = whole_checkpoint.load(
        stored, stored.every(), lambda n: make_executor(SETTINGS, n), trust=(), place=place
    )
    assert len(placed) == 1
    assert found["module"]["b"].untyped_storage().data_ptr() == placed[0].data_ptr()
    assert torch.equal(found["module"]["b"], state()["module"]["b"])


def test_a_file_that_is_there_stays(tmp_path: Path, write_file: Any) -> None:
    (tmp_path / "x.pt").write_bytes(b"another's")
    failed = write_file(tmp_path / "x.pt", state())
    with pytest.raises(StorageError, match="File exists"):
        failed.wait_committed()
    assert (tmp_path / "x.pt").read_bytes() == b"another's"


@pytest.mark.parametrize("point", ["open", "allocate", "write", "sync"])
def test_a_file_whose_write_fails_is_removed(point: str, tmp_path: Path, write_file: Any) -> None:
    _native.arm_fault(point, "fail", 28, 1, 1)
    try:
        failed = write_file(tmp_path / "x.pt", state())
        with pytest.raises(StorageError, match="No space left"):
            failed.wait_committed()
    finally:
        _native.clear_faults()
    assert list(tmp_path.iterdir()) == []
