"""Read and change the files of torch's own writer."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from datastates.adapters.dcp import DataStatesStorageReader
from datastates.reading.reads import Tally


def load(path: Path, into: dict[str, Any]) -> Tally:
    reader = DataStatesStorageReader(path)
    dcp.load(into, storage_reader=reader)
    assert reader.tally is not None
    return reader.tally


def places(path: Path) -> dict[str, Any]:
    """Where each tensor is, by name, as torch's metadata says."""
    storage = pickle.loads((path / ".metadata").read_bytes()).storage_data
    return {index.fqn: info for index, info in storage.items()}


def rewrite(path: Path, change: Callable[[bytes], bytes], name: str = "w") -> None:
    """Replace the archive of a tensor, which must be the last in its file."""
    info = places(path)[name]
    file = path / info.relative_path
    data = file.read_bytes()
    assert len(data) == info.offset + info.length
    made = change(data[info.offset :])
    file.write_bytes(data[: info.offset] + made)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for index, found in metadata.storage_data.items():
        if index.fqn == name:
            object.__setattr__(found, "length", len(made))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def archived(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def records(archive: bytes) -> dict[str, zipfile.ZipInfo]:
    return {info.filename: info for info in zipfile.ZipFile(io.BytesIO(archive)).infolist()}


def data_of(archive: bytes, name: str = "archive/data/0") -> int:
    """Where the data of a record begins."""
    header = records(archive)[name].header_offset
    return header + 30 + sum(struct.unpack_from("<HH", archive, header + 26))


def change_places(path: Path, change: Callable[[dict[Any, Any]], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata.storage_data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def repacked(archive: bytes, **changed: bytes) -> bytes:
    """The same records as Python's writer of zip files writes them, some with other contents."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            target.writestr(name, changed.get(name.removeprefix("archive/"), source.read(name)))
    return made.getvalue()
