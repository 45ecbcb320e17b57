"""Reads a checkpoint of Lightning: a file of ``torch.save`` with Lightning's version among its keys."""

from __future__ import annotations

from datastates.formats import torch_file
from datastates.formats.torch_file import TorchCheckpoint, TorchFile
from datastates.storage import store_of
from datastates.storage.location import Location

NAME = "a checkpoint of Lightning"
_VERSION = "pytorch-lightning_version"
_HEAD = 1 << 16
"""Bytes at the beginning that hold the begin of the pickle, in which Lightning writes its version early."""


def recognises(path: Location) -> bool:
    """Whether a file of ``torch.save`` has Lightning's version among its first keys."""
    return torch_file.recognises(path) and _VERSION.encode() in store_of(path).head(path, _HEAD)


def open(path: Location) -> TorchCheckpoint:
    """Open a file; raises as :func:`datastates.formats.torch_file.open` does."""
    file = TorchFile(path)
    value = file.value if isinstance(file.value, dict) else {}
    step = value.get("global_step") if _VERSION in value else None
    return TorchCheckpoint(NAME, path, [file], step if type(step) is int else None)
