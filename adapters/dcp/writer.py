"""The storage writer of torch.distributed.checkpoint: a rank's items become one container, written by the executor."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from datastates import durable
from datastates.adapters.dcp import metadata_file
from datastates.adapters.dcp.file_writer import FileWriter, identity
from datastates.adapters.dcp.items import results
from datastates.adapters.dcp.staging import Lazy, Staged, is_large
from datastates.config import IoSettings
from datastates.ending import FileEnding
from datastates.engine import make_executor
from datastates.errors import DatastatesError
from datastates.executor import Executor
from datastates.futures import Snapshot
from datastates.opened import open_container

_OWN = frozenset({"session", "_executor", "_files", "_staged"})
"""What belongs to one process."""


class WriterSettings(IoSettings):
    """What a writer can be told: the fields of :class:`~datastates.config.IoSettings`, and this."""

    rank_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds that a rank waits for the others in async_save(), before it names the missing.",
    )


class Closable(Protocol):
    """What is to be closed with a writer."""

    def close(self) -> None:
        """Wait for what is in flight, and give threads and memory back."""


class DataStatesStorageWriter(FileSystemWriter):
    """Writes checkpoints that ``dcp.load`` and torch's own ``FileSystemReader`` read, with this package's engine.

    A rank's items are coalesced into one file, ``__RANK_0.distcp``, with checksums and an index of its own.
    ``.metadata`` is replaced at once when all ranks have written: until then the checkpoint that was at the path before
    stands.

    For ``dcp.save``, and for ``dcp.async_save`` in a thread: there it stages by itself, lazily. Large tensors stay
    where they are, and every torch optimizer's ``step()`` waits until they are captured; all else is copied. For
    ``AsyncCheckpointerType.PROCESS`` give an ``async_stager`` that copies, such as torch's ``DefaultStager``.

    Keep one for all checkpoints, and name each by ``checkpoint_id``: it keeps its plans, and its pinned memory. Used by
    one save at a time.
    """

    def __init__(
        self, path: str | os.PathLike[str] = "", *, overwrite: bool = True, lazy: Lazy = is_large, **options: Any
    ) -> None:
        """Write to ``path``, or to what ``checkpoint_id`` names.

        Args:
            path: A directory; it is created.
            overwrite: Replace a checkpoint that is there; otherwise that is refused.
            lazy: Given the name of a tensor in the state dict and (this rank's part of) the tensor, whether only an
                optimizer step changes it. By default those of 64 KiB and more.
            **options: Fields of :class:`WriterSettings`.

        Raises:
            SettingsError: An option is unknown or impossible.
        """
        super().__init__(path, overwrite=overwrite)
        self.settings = WriterSettings.of(options)
        self.lazy = lazy
        self._start()

    def _start(self) -> None:
        self.session: Closable | None = None
        """What :func:`~datastates.adapters.dcp.async_save` keeps from one save to the next."""
        self._executor: Executor | None = None
        self._files: FileWriter | None = None
        self._staged: Staged | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For another process: what it was made of."""
        if self._staged is not None:
            error = DatastatesError(
                "state that was staged lazily cannot be saved by another process: give dcp.async_save an async_stager "
                "that copies it, such as torch's DefaultStager"
            )
            self._staged.give_up(error)
            self._staged = None
            raise error
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The mirror of :meth:`__getstate__`."""
        vars(self).update(state)
        self._start()

    def close(self) -> None:
        """Wait for saves in flight, and give threads and memory back; the next save takes them again. Idempotent."""
        if self._executor is not None:
            self._executor.close()
        self._executor = self._files = None
        if self.session is not None:
            self.session.close()
            self.session = None

    # --- staging

    def hold(self, state_dict: dict[str, Any]) -> Staged:
        """Guard a state dict until the save that is to come has captured it.

        Raises:
            DatastatesError: One is held already: its save has not begun.
        """
        if self._staged is not None and not self._staged.snapshot.ended:
            raise DatastatesError("a state is staged already, and its save has not captured it: one save at a time")
        self._staged = Staged(state_dict, self.lazy)
        return self._staged

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The live state, guarded, with copies of what may change at any time: see the class."""
        return self.hold(state_dict).state_dict

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: it is the optimizers that wait."""
        return False

    def synchronize_staging(self) -> None:
        """Wait until what is staged may change."""
        if (staged := self._staged) is not None:
            staged.snapshot.wait_free()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, to ``checkpoint_id`` if it is given."""
        super().reset(checkpoint_id)
        if self._staged is not None:
            self._staged.saved_by(threading.current_thread())

    # --- saving

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; returns when they are on stable storage.

        Raises:
            StorageError: The file could not be written; nothing is left of it.
            TornSnapshotError: Staged state was changed before it was captured; the message names the tensors.
        """
        staged, self._staged = self._staged, None
        snapshot = staged.snapshot if staged else Snapshot(0, 0, time.monotonic())
        with staged.capturing() if staged else contextlib.nullcontext():
            ending = FileEnding(self.new_file(plan), identity(self.save_id[:8]))
            if self._files is None:
                self._executor = make_executor(self.settings)
                self._files = FileWriter(self._executor)
            running, indices = self._files.begin(plan, planner, ending, snapshot)
        running.run()
        snapshot.wait_committed()
        durable.sync_directory(ending.path.parent)
        written: Future[list[WriteResult]] = Future()
        written.set_result(results(indices, open_container(ending.path)))
        return written

    def new_file(self, plan: SavePlan) -> Path:
        """A name for this rank's file that no file has: one of a checkpoint that is being replaced is still needed."""
        assert isinstance(plan.storage_data, _StoragePrefix)
        directory = Path(self.path)
        names = (directory / f"{plan.storage_data.prefix}{n}{DEFAULT_SUFFIX}" for n in itertools.count())
        return next(path for path in names if not path.exists())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Let the directory be this checkpoint; on the coordinator."""
        path = metadata_file.path_of(Path(self.path), None if self.use_collectives else self.rank)
        metadata_file.publish(path, metadata, results, self.storage_meta())
