"""datastates under torch.distributed.checkpoint: its storage writer and reader, and its ``async_save``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from datastates.adapters.dcp import DataStatesStorageReader, DataStatesStorageWriter, async_save
from peers.base import Pending
from peers.dcp_peer import Dcp
from states import State, plain


class DatastatesThroughDcp(Dcp):
    """``dcp.save`` and ``dcp.load`` as for torch's own files, and ``datastates.adapters.dcp.async_save``."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory)
        self.settings = (
            "dcp.save(storage_writer=DataStatesStorageWriter(), DefaultSavePlanner(enable_plan_caching=True)); "
            "datastates.adapters.dcp.async_save with the same writer; checksums on"
        )
        self._options = options
        self._own_writer = DataStatesStorageWriter(**options)

    def save(self, state: State) -> Path:
        path = self.next_path()
        save(plain(state), checkpoint_id=path, storage_writer=self._own_writer, planner=self._planner, **self._group)
        return path

    def save_async(self, state: State) -> Pending:
        path = self.next_path()
        snapshot = async_save(plain(state), path, storage_writer=self._own_writer)
        return Pending(path, snapshot.wait_committed)

    def restore(self, path: Path, state: State) -> None:
        reader = DataStatesStorageReader(path, **self._options)
        load(plain(state), storage_reader=reader, **self._group)

    def close(self) -> None:
        self._own_writer.close()
