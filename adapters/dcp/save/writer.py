"""The storage writer for torch.distributed.checkpoint: the executor writes a rank's items into one container."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import Unpack

from datastates.adapters.dcp import metadata_file
from datastates.adapters.dcp.names import NAME
from datastates.adapters.dcp.save.items import Written, boxes_of
from datastates.adapters.dcp.save.one_rank import warn_of_plain_tensors
from datastates.adapters.dcp.store_files import StoreFiles
from datastates.adapters.shared.tried import warn_of_untried
from datastates.config import IoOptions, IoSettings
from datastates.errors import DatastatesError, storage_errors
from datastates.files.boxes import BoxFiles
from datastates.files.staging import Staged, StagedStateDict, is_large
from datastates.files.torch_files import Lazy
from datastates.storage import Location, store_of


class WriterSettings(IoSettings):
    """The options of a writer: the fields of :class:`~datastates.config.IoSettings`, and one more."""

    rank_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds that a rank waits for the others in async_save(), before it names the missing.",
    )


class WriterOptions(IoOptions, total=False):
    """The fields of :class:`WriterSettings` as keyword arguments, for type checkers."""

    rank_timeout: float


class Closable(Protocol):
    """An object that is closed together with a writer."""

    def close(self) -> None:
        """Wait for saves in flight, and give threads and memory back."""


class DataStatesStorageWriter(FileSystemWriter):
    """Writes checkpoints that ``dcp.load`` and torch's own ``FileSystemReader`` read, with this package's engine.

    Each rank writes its items into one file, such as ``__RANK_0.distcp``, with checksums and an index of its own. Once
    all ranks have written, ``.metadata`` is replaced atomically. Until then the previous checkpoint at the path stands.

    At an address, each rank uploads its file from the host cache, under a name that no other save uses. Where a
    checkpoint is overwritten, a reader finds the old ``.metadata`` or the new one; then the old files are deleted. What
    ``dcp.save`` has written on one rank stays where another one fails.

    It serves ``dcp.save`` and ``dcp.async_save`` with a thread. For the latter it stages lazily: large tensors stay
    where they are, every torch optimizer's ``step()`` waits until they are captured, and everything else is copied. For
    ``AsyncCheckpointerType.PROCESS``, give an ``async_stager`` that copies, such as torch's ``DefaultStager``.

    Keep one writer for all checkpoints, as it keeps plans and pinned memory, and name each checkpoint by
    ``checkpoint_id``. One save at a time may use it, except through :func:`~datastates.adapters.dcp.async_save`, which
    allows two.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "",
        *,
        overwrite: bool = True,
        lazy: Lazy = is_large,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        **options: Unpack[WriterOptions],
    ) -> None:
        """Write to ``path``, or to the ``checkpoint_id`` that is given to the save.

        Args:
            path: A directory, which is created, or an address in a store.
            overwrite: Whether to replace a checkpoint that is there; otherwise such a save is refused.
            lazy: Given the name of a tensor in the state dict and the tensor (of a DTensor, this rank's part), whether
                only an optimizer step changes it. By default, tensors of 64 KiB and more.
            _extensions: As of torch's own writer: they transform the streams. With any, torch writes the files, and
                staging copies the state.
            **options: Fields of :class:`WriterSettings`.

        Raises:
            SettingsError: An option is unknown or its value is invalid.
            ValueError: ``path`` is an address that no store serves.
        """
        super().__init__("", overwrite=overwrite, _extensions=_extensions)
        warn_of_untried("torch")
        self.fs = StoreFiles()
        self.path = self.fs.init_path(path)
        self.settings = WriterSettings.of(options)
        self.lazy = lazy
        self._start()

    def _start(self) -> None:
        """Set the attributes that belong to one process."""
        self.session: Closable | None = None
        """The session that :func:`~datastates.adapters.dcp.async_save` keeps between saves; None before the first."""
        self._files: BoxFiles | None = None
        self._staged: Staged | None = None
        self._saver: threading.Thread | None = None
        self._finishes = True
        self._has_warned = False
        self._writing = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the path, to make a new writer in another process."""
        fresh = object.__new__(type(self))
        fresh._start()
        return {name: value for name, value in vars(self).items() if name not in vars(fresh)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin as a new writer with these settings and this path."""
        vars(self).update(state)
        self._start()

    def close(self) -> None:
        """Wait for saves in flight, then free threads and memory. Idempotent; the next save allocates them again."""
        if (staged := self._staged) is not None:
            staged.wait_begun()
        with self._writing:
            if self._files is not None:
                self._files.close()
            self._files = None
        if self.session is not None:
            self.session.close()
            self.session = None

    # --- staging

    def hold(self, state_dict: dict[str, Any]) -> Staged:
        """Copy the state that may change at any time, and guard the rest of it until the next save has captured it.

        Returns:
            The staged state.

        Raises:
            DatastatesError: A save with this writer is under way.
        """
        if self._saver is threading.current_thread():
            self._saver = None  # this thread is back: its save has failed
        if self._is_taken() or (self._staged is not None and not self._staged.is_over()):
            raise _taken()
        self._staged = staged = Staged(state_dict, None if self.transforms.extensions else self.lazy)
        if self.transforms.extensions and staged.is_copy:
            staged.captured_elsewhere()
        return staged

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`hold`; returns the state dict, live where it is lazy. ``dcp.async_save`` calls this."""
        return StagedStateDict(self.hold(state_dict))

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: the optimizers wait for the capture, so ``dcp.async_save`` need not."""
        return False

    def synchronize_staging(self) -> None:
        """Wait until the staged state may change."""
        if (staged := self._staged) is not None:
            staged.wait_free()

    # --- one save at a time

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, to ``checkpoint_id`` if it is given.

        Raises:
            DatastatesError: Another save with this writer is under way.
            ValueError: ``checkpoint_id`` is an address that no store serves.
        """
        self.fs.init_path(checkpoint_id or "")
        self._enter()
        super().reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Identify the save. DCP calls this first in a save, on the thread that goes on to write."""
        self._enter()
        return super().storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take part in a save. The coordinator finishes it, or every rank where there are no collectives."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._finishes = is_coordinator or not self.use_collectives

    def _enter(self) -> None:
        if self._is_taken():
            raise _taken()
        self._saver = threading.current_thread()
        if (staged := self._staged) is not None:
            if not staged.is_claimed:
                staged.saved_by(self._saver)
            elif staged.is_over():  # the save that was to capture it has failed
                self._staged = None

    def _is_taken(self) -> bool:
        saver = self._saver
        return saver is not None and saver is not threading.current_thread() and saver.is_alive()

    # --- saving

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; returns once they are on stable storage.

        Args:
            plan: The items.
            planner: Resolves each item to its data.

        Returns:
            A future that is done already, with the place of each item in the file.

        Raises:
            ProviderError: An item is no tensor that can be stored; the message names it.
            StorageError: The file could not be written; nothing is left of it.
            CommitError: Another program has replaced the file.
            TornSnapshotError: Staged state was changed before it was captured; the message names the tensors.
        """
        ended = True
        try:
            with self._writing:
                written = self._write(plan, planner)
            ended = not self._finishes
            return written
        finally:
            if ended:
                self._saver = None

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        given, self._staged = self._staged, None
        # state that was not staged stays as it is until this save returns, and needs no gate
        staged = given or Staged({}, self.lazy, owned=True)
        try:
            with staged.capturing() if given else contextlib.nullcontext():
                staged.check()
                if self._finishes and not self._has_warned:
                    self._has_warned = True
                    warn_of_plain_tensors(getattr(planner, "state_dict", None))
                if self.transforms.extensions:
                    written = self._write_by_torch(plan, planner)
                    staged.captured_elsewhere()
                    return written
                if self._files is None:
                    self._files = BoxFiles(self.settings)
                indices: dict[str, MetadataIndex] = {}
                boxes = boxes_of(plan, planner, indices)
                running, file = self._files.begin_alone(NAME, boxes, staged, self.new_file(plan), self.save_id[:8])
        except BaseException:
            staged.snapshot.exception()  # it is reported by the raise
            raise
        running.run()
        staged.snapshot.wait_committed()
        written = Future()
        written.set_result(Written(file, indices).results(staged.snapshot.report.file_nbytes))
        _settle(file.path, plan)
        return written

    def _write_by_torch(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Let torch write this rank's items through its extensions, into a file that replaces none."""
        path = self.new_file(plan)
        files: queue.Queue[tuple[Path | str, str, list[WriteItem]]] = queue.Queue()
        files.put((path.face, path.name, plan.items))
        self.sync_files = not path.scheme  # a store has what it was given
        try:
            with storage_errors("write", path):
                written = self._write_data(planner, files)
        except BaseException:
            with contextlib.suppress(OSError):  # the writer's own error is the one to report
                store_of(path).discard([path])
            raise
        _settle(path, plan)
        return written

    def new_file(self, plan: SavePlan) -> Location:
        """An unused name for this rank's file: the files of a checkpoint that is being replaced are still needed."""
        assert isinstance(plan.storage_data, _StoragePrefix)
        begin, directory = plan.storage_data.prefix, Location(self.path)
        if directory.scheme:  # no name is given twice: the object of a save that was killed may appear late
            return directory / f"{begin}{secrets.token_hex(8)}{DEFAULT_SUFFIX}"
        names = (directory / f"{begin}{n}{DEFAULT_SUFFIX}" for n in itertools.count())
        return next(path for path in names if not store_of(path).exists(path))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, on the coordinator.

        Raises:
            StorageError: ``.metadata`` could not be written, or may not survive a power failure.
        """
        path = metadata_file.path_of(Location(self.path), None if self.use_collectives else self.rank)
        try:
            stored, error = metadata_file.publish(path, metadata, results, super().storage_meta())
            if error is not None:
                raise error
            vars(metadata).update(vars(stored))  # dcp.save returns ``metadata``
        finally:
            self._saver = None


def _settle(path: Location, plan: SavePlan) -> None:
    """Keep a file that was written, or remove it if this rank has no part of the checkpoint."""
    if not plan.items:
        store_of(path).discard([path])
    store_of(path).sync_folder(path.parent)


def _taken() -> DatastatesError:
    return DatastatesError("a save with this writer is under way: one at a time, or a writer for each")
