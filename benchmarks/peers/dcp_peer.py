"""torch.distributed.checkpoint, in one process or on all ranks, saving at once and in the background."""

from __future__ import annotations

import concurrent.futures
import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from peers.base import Pending, System, fsync_tree
from states import State, plain

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_THREADS = 8
"""Writer threads, each with its own file. One thread took twice as long as two; more than two did no harm."""


class Dcp(System):
    """``dcp.save`` with plans cached between saves and several writer threads; it syncs its files (``sync_files``).

    Each save syncs the directories as well, and the measured time includes this. The ranks plan in a gloo group of
    their own: objects need not pass through a GPU, and a background save does not mix with training's collectives.
    """

    settings = (
        f"FileSystemWriter(thread_count={_THREADS}, sync_files=True), DefaultSavePlanner(enable_plan_caching=True)"
    )

    _planner_class = DefaultSavePlanner

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._planner = self._planner_class(enable_plan_caching=True)
        alone = not dist.is_initialized()
        self._is_coordinator = alone or dist.get_rank() == 0
        self._group: dict[str, Any] = {"no_dist": True} if alone else {"process_group": dist.new_group(backend="gloo")}

    def save(self, state: State) -> Path:
        path = self.next_path()
        save(plain(state), storage_writer=self._writer(path), planner=self._planner, **self._group)
        self._sync(path)
        return path

    def restore(self, path: Path, state: State) -> None:
        load(plain(state), storage_reader=FileSystemReader(path), **self._group)  # tensors and other values in place

    def _sync(self, path: Path) -> None:
        """Sync on the coordinator alone, as its save returns when all ranks have written."""
        if self._is_coordinator:
            fsync_tree(path)

    def _writer(self, path: Path) -> FileSystemWriter:
        return FileSystemWriter(path, thread_count=_THREADS, sync_files=True)


_STAGER_CLOSED = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether ``async_save`` closes the stager that it is given, as torch 2.11 does. Such a stager loses its memory."""


class _StagedPlanner(DefaultSavePlanner):
    """The default planner under another name: torch caches plans by class name, and staged tensors need their own."""


class DcpAsync(Dcp):
    """``dcp.async_save`` in a thread, staged into host memory that is kept and, on a GPU, pinned.

    All saves share one stager, which keeps its memory. On a GPU where torch closes stagers, it stages within the call.
    Elsewhere it stages in the background, and the gate waits for that before an update.
    """

    _planner_class = _StagedPlanner

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        gpu = torch.cuda.is_available()
        self._stager: DefaultStager | BlockingAsyncStager
        if gpu and _STAGER_CLOSED:
            stager = "BlockingAsyncStager kept (cache_staged_state_dict=True)"
            self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        else:
            stager = (
                f"DefaultStager kept (use_async_staging=True, use_pinned_memory={gpu}, use_non_blocking_copy={gpu}, "
                "use_shared_memory=False)"
            )
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=gpu
                )
            )
        self.settings = f"{Dcp.settings}; async_save in a thread, {stager}"
        self._staging: concurrent.futures.Future[None] | None = None

    def save_async(self, state: State) -> Pending:
        path = self.next_path()
        response = async_save(
            plain(state),
            storage_writer=self._writer(path),
            planner=self._planner,
            async_stager=self._stager,
            **self._group,
        )
        upload: concurrent.futures.Future[Any]
        if isinstance(response, AsyncSaveResponse):
            self._staging, upload = response.staging_completion, response.upload_completion
        else:
            upload = response

        def wait() -> None:
            upload.result()
            self._sync(path)

        return Pending(path, wait)

    def gate(self) -> contextlib.AbstractContextManager[object]:
        if self._staging is not None:
            self._staging.result()
            self._staging = None
        return contextlib.nullcontext()

    def close(self) -> None:
        self._stager.close()
