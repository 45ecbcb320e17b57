"""torch.distributed.checkpoint in one process, saving at once and in the background."""

from __future__ import annotations

import contextlib
import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from peers.base import Pending, System, fsync_tree
from states import State, plain

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_THREADS = 8
"""Writer threads, each with a file of its own: one took twice as long as two, and more than that did no harm."""


class Dcp(System):
    """``dcp.save`` with plans cached between saves and several writer threads; it syncs its files (``sync_files``).

    The directories are ours to sync, within the time.
    """

    settings = (
        f"FileSystemWriter(thread_count={_THREADS}, sync_files=True), DefaultSavePlanner(enable_plan_caching=True)"
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._planner = DefaultSavePlanner(enable_plan_caching=True)

    def save(self, state: State) -> Path:
        path = self.next_path()
        save(plain(state), storage_writer=self._writer(path), planner=self._planner, no_dist=True)
        fsync_tree(path)
        return path

    def restore(self, path: Path, state: State) -> None:
        load(plain(state), checkpoint_id=path, no_dist=True)  # tensors and other values in place

    def _writer(self, path: Path) -> FileSystemWriter:
        return FileSystemWriter(path, thread_count=_THREADS, sync_files=True)


class DcpAsync(Dcp):
    """``dcp.async_save`` in a thread, staged in the background into host memory that is kept and, on a GPU, pinned.

    One stager for all saves keeps its memory. Updates must wait for the staging, which is what the gate does.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        gpu = torch.cuda.is_available()
        self.settings = (
            f"{Dcp.settings}; async_save in a thread, DefaultStager kept (use_async_staging=True, "
            f"use_pinned_memory={gpu}, use_non_blocking_copy={gpu}, use_shared_memory=False)"
        )
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=gpu
            )
        )
        self._staging: Future[None] | None = None

    def save_async(self, state: State) -> Pending:
        path = self.next_path()
        response = async_save(
            plain(state),
            storage_writer=self._writer(path),
            planner=self._planner,
            async_stager=self._stager,
            no_dist=True,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._staging = response.staging_completion

        def wait() -> None:
            response.upload_completion.result()
            fsync_tree(path)

        return Pending(path, wait)

    def gate(self) -> contextlib.AbstractContextManager[object]:
        if self._staging is not None:
            self._staging.result()
            self._staging = None
        return contextlib.nullcontext()

    def close(self) -> None:
        self._stager.close()
