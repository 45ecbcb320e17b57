"""Reads checkpoints of Megatron-Core in its format ``torch_dist``: DCP's files, ``metadata.json``, ``common.pt``."""

from __future__ import annotations

from datastates.errors import FormatError
from datastates.formats import dcp
from datastates.formats.composite import Composite
from datastates.formats.json_field import read_field
from datastates.formats.torch_file import TorchFile
from datastates.storage import store_of
from datastates.storage.location import Location

NAME = "a checkpoint of Megatron-Core (torch_dist)"
_DESCRIPTION = "metadata.json"
_COMMON = "common.pt"
_MOST = 1 << 16
"""Longest description in bytes: it has two names and a number."""


def recognises(path: Location) -> bool:
    """Whether a folder of DCP has a description that names Megatron's backend."""
    return dcp.recognises(path) and store_of(path).is_file(path / _DESCRIPTION)


def open(path: Location) -> Composite:
    """Open a folder. Its keys are the names of DCP; the keys of ``common.pt`` begin with ``common``.

    Raises:
        FormatError: A file is damaged, or the tensors are in another backend's format; the message names the file.
        StorageError: A file is missing or cannot be read; the message names it.
    """
    file = path / _DESCRIPTION
    backend = read_field(file, "sharded_backend", "description of a checkpoint", most=_MOST)
    if backend != "torch_dist":
        raise FormatError(f"{file}: the checkpoint is of the backend {backend!r:.40}, and only torch_dist is read")
    others = {"common": TorchFile(path / _COMMON, "common")} if store_of(path).is_file(path / _COMMON) else {}
    return Composite(NAME, path, dcp.DcpCheckpoint(dcp.NAME, path), others)
