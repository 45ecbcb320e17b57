"""Orbax on host tensors, whose memory it gets as NumPy's arrays."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch

from peers.base import AsyncSystem, Pending, fsync_tree
from states import State, plain, tensors


class Orbax(AsyncSystem):
    """``AsyncCheckpointer`` with its handler of trees. It copies the arrays within the call, so nothing is gated."""

    settings = "AsyncCheckpointer, use_ocdbt=True, use_zarr3=True, no compression; tensors only; then fsync"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    def save_async(self, state: State) -> Pending:
        path = self.next_path()
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(_arrays(state)))

        def wait() -> None:
            self._checkpointer.wait_until_finished()
            fsync_tree(path)

        return Pending(path, wait)

    def restore(self, path: Path, state: State) -> None:
        restored = self._checkpointer.restore(path, args=ocp.args.PyTreeRestore())
        for name, array in _arrays(state).items():
            array[...] = restored[name]


def _arrays(state: State) -> dict[str, np.ndarray]:
    """The memory of all tensors. After ``numpy()`` datastates would take it for memory that NumPy may change unseen."""
    found = {}
    for name, tensor in tensors(plain(state)):
        half = tensor.dtype is torch.bfloat16
        array = np.from_dlpack(tensor.detach().view(torch.int16) if half else tensor.detach())
        found[name] = array.view(ml_dtypes.bfloat16) if half else array
    return found
