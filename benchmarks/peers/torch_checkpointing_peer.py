"""torch_checkpointing, saving within the call and from a process of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from peers.base import AsyncSystem, Pending, fsync_tree
from states import State, assign, plain

_THREADS = 4
"""Files written at the same time. The state has one file for each of its names."""


class TorchCheckpointing(AsyncSystem):
    """``CheckpointManager`` that saves within the call.

    It has ``use_direct_io=False``, as its default, O_DIRECT, fails on ext4. It does not sync: an fsync follows, within
    the measured time.
    """

    settings = f"with_sync_save, use_direct_io=False, file_write_max_threads={_THREADS}, then fsync; load(into=state)"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=self._saver(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
            )
        )

    def _saver(self) -> SyncCheckpointSaverConfig | AsyncCheckpointSaverConfig:
        return SyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=_THREADS))

    def save_async(self, state: State) -> Pending:
        path = self.next_path()
        written = self._manager.save(str(path), plain(state))

        def wait() -> None:
            if written is not None:
                written.result()
            fsync_tree(path)

        return Pending(path, wait)

    def restore(self, path: Path, state: State) -> None:
        live = plain(state)
        assign(live, self._manager.load(str(path), into=live, strict=True))

    def close(self) -> None:
        self._manager.close()


class TorchCheckpointingAsync(TorchCheckpointing):
    """``CheckpointManager`` that stages into shared memory, pinned on a GPU, and writes from a process of its own.

    As its guide says, updates run within ``manager.lock()``, and without CUDA nothing is pinned.
    """

    settings = (
        f"with_async_save, use_direct_io=False, file_write_max_threads={_THREADS}, staged asynchronously into shared "
        "memory (pinned with CUDA), written by its process, then fsync"
    )

    def _saver(self) -> SyncCheckpointSaverConfig | AsyncCheckpointSaverConfig:
        gpu = torch.cuda.is_available()
        return AsyncCheckpointSaverConfig(
            writer_config=CheckpointWriterConfig(file_write_max_threads=_THREADS),
            staging_config=CheckpointStagerConfig(use_pinned_memory=gpu, use_non_blocking_copy=gpu),
        )

    def gate(self) -> contextlib.AbstractContextManager[object]:
        return self._manager.lock()
