"""torch.save and torch.load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from peers.base import System, fsync_tree
from states import State, assign, plain


class TorchSave(System):
    """One file. torch does not sync it: an fsync follows, within the measured time.

    ``weights_only=False`` uses the unpickler in C, which loads thousands of tensors in less than half the time.
    """

    settings = "torch.save to a path, then fsync; torch.load(map_location='cpu', weights_only=False), then copy_"
    _load: ClassVar[dict[str, Any]] = {"map_location": "cpu", "weights_only": False}

    def save(self, state: State) -> Path:
        path = self.next_path()
        torch.save(plain(state), os.fspath(path))  # to a path: written from C++, without a detour through Python
        fsync_tree(path)
        return path

    def restore(self, path: Path, state: State) -> None:
        assign(plain(state), torch.load(path, **self._load))


class TorchSaveMmap(TorchSave):
    """The same file, mapped instead of read, which saves one copy."""

    settings = "torch.save to a path, then fsync; torch.load(mmap=True, weights_only=False), then copy_"
    _load: ClassVar[dict[str, Any]] = {"map_location": "cpu", "weights_only": False, "mmap": True}
