"""TorchSnapshot."""

from __future__ import annotations

import warnings
from pathlib import Path

from torchsnapshot import Snapshot, StateDict

from peers.base import System, fsync_tree
from states import State, assign, plain

warnings.filterwarnings("ignore", message="TypedStorage is deprecated")


class TorchSnapshot(System):
    """``Snapshot.take`` with its defaults: small tensors batched into slabs, 16 files and 4 copies at once.

    It does not sync: an fsync of files and directories follows, within the measured time.
    """

    settings = "Snapshot.take with its defaults (batching on), then fsync; Snapshot.restore in place"

    def save(self, state: State) -> Path:
        path = self.next_path()
        Snapshot.take(str(path), {"state": StateDict(**plain(state))})
        fsync_tree(path)
        return path

    def restore(self, path: Path, state: State) -> None:
        live = plain(state)
        held = StateDict(**live)
        Snapshot(str(path)).restore({"state": held})  # it restores tensors in place, and makes new containers
        assign(live, held.data)
