"""safetensors. It stores tensors only: the state's few Python objects are left out, to its advantage."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from peers.base import System, fsync_tree
from states import State, plain, tensors


class Safetensors(System):
    """One file, written by ``save_file``, which does not sync. An fsync follows, within the measured time.

    Loading maps the file. The copies into the live tensors read it.
    """

    settings = "tensors only; save_file, then fsync; load_file, then copy_"

    def save(self, state: State) -> Path:
        path = self.next_path()
        save_file({name: t.detach() for name, t in tensors(plain(state))}, path)
        fsync_tree(path)
        return path

    def restore(self, path: Path, state: State) -> None:
        loaded = load_file(path)
        for name, live in tensors(plain(state)):
            live.detach().copy_(loaded[name])
