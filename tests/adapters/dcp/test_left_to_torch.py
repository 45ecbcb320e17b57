"""Torch reads what this package does not know in files of torch's own writer, with the result of torch alone."""

from __future__ import annotations

import copy
import errno
import functools
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from inverted import Inverted
from stock import archived, change_places, repacked, rewrite
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from datastates.adapters.dcp import DataStatesStorageReader, DataStatesStorageWriter, async_save
from datastates.errors import DatastatesError, FormatError
from datastates.saving import snapshot as snapshots
from states import blank, failure, same, save_with


def compressed(archive: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name), zipfile.ZIP_DEFLATED)
    return made.getvalue()


def legacy(tensor: torch.Tensor) -> bytes:
    made = io.BytesIO()
    torch.save(tensor, made, _use_new_zipfile_serialization=False)
    return made.getvalue()


CONJUGATE = torch.complex(torch.arange(100.0), torch.arange(100.0)).conj()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda a: repacked(a, byteorder=b"big"), torch.arange(100.0)),
        (lambda a: compressed(a), torch.arange(100.0)),
        (lambda a: legacy(torch.arange(100.0)), torch.arange(100.0)),
        (lambda a: archived(CONJUGATE), CONJUGATE),
        (lambda a: archived(torch.arange(100.0).to_sparse()), None),
    ],
    ids=["big endian", "compressed", "legacy", "conjugate", "sparse"],
)
def test_what_is_not_known_is_left_to_torch(
    tmp_path: Path, by_torch: list[str], change: Any, expected: torch.Tensor | None
) -> None:
    save_with("stock", {"v": torch.ones(5), "w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, change)
    dtype = torch.float32 if expected is None else expected.dtype
    theirs, ours = ({"v": torch.zeros(5), "w": torch.zeros(100, dtype=dtype)} for _ in range(2))
    failed: list[bool] = []
    for into, reader in ((theirs, FileSystemReader(tmp_path)), (ours, DataStatesStorageReader(tmp_path))):
        del by_torch[:]
        try:
            dcp.load(into, storage_reader=reader)
            failed.append(False)
        except CheckpointException:
            failed.append(True)
    assert failed[0] == failed[1]
    assert by_torch == ["w"]
    same(ours, theirs)


def test_a_shape_other_than_planned_is_torchs_to_refuse(tmp_path: Path, by_torch: list[str]) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, lambda _: archived(torch.arange(50.0)))
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, FormatError)
    assert "'w' in " in str(found)
    assert by_torch == ["w"]


def test_what_an_extension_has_written_is_left_to_torch(tmp_path: Path, by_torch: list[str]) -> None:
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    state = {"w": torch.arange(100.0), "n": 5}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Inverted()]))
    registry = ExtensionRegistry()
    registry.register(Inverted)
    into = blank(state)
    dcp.load(into, storage_reader=DataStatesStorageReader(tmp_path, registry))
    same(into, state)
    assert sorted(by_torch) == ["n", "w"]


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_extensions_write_as_with_torch(how: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    registry = ExtensionRegistry()
    registry.register(Inverted)
    live = {"w": torch.nn.Parameter(torch.arange(50_000.0)), "n": 5}
    expected = copy.deepcopy(live)
    kinds = {"stock": dcp.FileSystemWriter, "ours": DataStatesStorageWriter}
    writers: dict[str, Any] = {name: kind(tmp_path / name, _extensions=[Inverted()]) for name, kind in kinds.items()}
    for name, writer in writers.items():
        for _ in range(2):  # the second one replaces the first
            if how == "save":
                dcp.save(live, storage_writer=writer)
            elif name == "ours":
                future: Any = dcp.async_save(live, storage_writer=writer)
                live["w"].grad = torch.ones(50_000)
                torch.optim.SGD([live["w"]], 1.0).step()  # nothing waits: the state was copied
                future.result()
                live["w"].data.copy_(expected["w"])
            else:
                dcp.async_save(live, storage_writer=writer).result()
        into = {"w": torch.zeros(50_000), "n": 0}
        dcp.load(into, storage_reader=FileSystemReader(tmp_path / name, registry))
        same(into, {"w": expected["w"].detach(), "n": 5})
        with pytest.raises(CheckpointException):
            dcp.load(blank(into), storage_reader=FileSystemReader(tmp_path / name))
    (stock,), (ours,) = (sorted((tmp_path / name).glob("*.distcp")) for name in writers)
    assert len(ours.read_bytes()) == len(stock.read_bytes())
    writers["ours"].close()
    with pytest.raises(ValueError, match="extensions: "):
        async_save(live, tmp_path / "other", storage_writer=DataStatesStorageWriter(_extensions=[Inverted()]))


class Refused(Inverted):
    """Fails as on a full disk."""

    def transform_to(self, output: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_an_extension_that_fails_leaves_nothing(how: str, tmp_path: Path) -> None:
    writer = DataStatesStorageWriter(tmp_path, _extensions=[Refused()])
    state = {"w": torch.ones(5)}
    future: Any = dcp.async_save(state, storage_writer=writer) if how == "async_save" else None
    with pytest.raises(CheckpointException, match="No space left"):
        _ = dcp.save(state, storage_writer=writer) if future is None else future.result()
    assert list(tmp_path.iterdir()) == []
    assert snapshots._silent == set(), "the process would end with status 120"
    writer.close()


def test_safetensors_fails_as_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    format_ = SerializationFormat.SAFETENSORS
    dcp.save({"w": torch.ones(5)}, storage_writer=dcp.FileSystemWriter(tmp_path, serialization_format=format_))
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(5)}, storage_reader=FileSystemReader(tmp_path))
    assert isinstance(failure(tmp_path, {"w": torch.zeros(5)}), DatastatesError)


def test_a_target_of_another_shape_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    wrong = functools.partial(torch.zeros, 7)
    monkeypatch.setattr(dcp.DefaultLoadPlanner, "resolve_tensor", lambda *_: wrong())
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, ValueError)
    assert "'w'" in str(found)


def test_items_that_overlap_are_left_to_torch(tmp_path: Path, by_torch: list[str]) -> None:
    save_with("stock", {"w": torch.arange(1000.0), "n": 5}, tmp_path)

    def overlap(storage: dict[Any, Any]) -> None:
        infos = {index.fqn: info for index, info in storage.items()}
        infos["n"].offset, infos["n"].length = infos["w"].offset + 2000, 100

    change_places(tmp_path, overlap)
    got = []

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            got.append(len(value.read()))

    into = {"w": torch.zeros(1000), "n": 0}
    dcp.load(into, storage_reader=DataStatesStorageReader(tmp_path), planner=Planner())
    assert torch.equal(into["w"], torch.arange(1000.0))
    assert got == [100]
    assert sorted(by_torch) == ["n", "w"]
