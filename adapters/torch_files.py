"""Saves whole state dicts for ``torch.load``, and tensors as safetensors, while training goes on. For frameworks."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from pydantic import Field

from datastates._base import log
from datastates._base.tasks import Task
from datastates._base.waiting import Flag
from datastates._base.workers import Work, Workers
from datastates.adapters import looks
from datastates.adapters.shared.guarded import Lazy
from datastates.commit.pending import Pending
from datastates.config import IoOptions, IoSettings
from datastates.errors import ClosedError, ProviderError, SnapshotAbandonedError, ThreadStartError
from datastates.executor.make import make_executor, prepare
from datastates.providers.nested.tree import TreeProvider
from datastates.ranks.world import SoloWorld
from datastates.saving.container_frame import ContainerFraming
from datastates.saving.engine import Engine
from datastates.saving.frame import Framing
from datastates.saving.safetensors_frame import SafetensorsFraming
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot, wait_ended
from datastates.state import arrays, keys
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Shard
from datastates.storage import Location

_WORD = 8
"""Bytes that a fingerprint takes at once."""


class FileSettings(IoSettings):
    """Settings of checkpoints in files: the fields of :class:`~datastates.config.IoSettings`, and more."""

    on_error: Literal["raise", "warn"] = Field(
        "raise",
        description="Raise a failure of a checkpoint at a later save or at the end, on all its ranks, or only log it.",
    )
    max_in_flight: int = Field(
        2, ge=1, le=64, description="Checkpoints that may be under way at once; a further save waits."
    )


class FileOptions(IoOptions, total=False):
    """The fields of :class:`FileSettings` as keyword arguments, for type checkers."""

    on_error: Literal["raise", "warn"]
    max_in_flight: int


class _StateDict(TreeProvider):
    """A state dict on its way into a file. The framework that saved it restores it."""

    def __init__(self, name: str, state: Any, lazy: Lazy) -> None:
        super().__init__(name)
        self._state = state
        self._lazy = lazy

    def value(self) -> object:
        return self._state

    def is_lazy(self, key: str, array: object) -> bool:
        return isinstance(array, torch.Tensor) and self._lazy(key, array)

    def match(self, stored: object, saved: Saved) -> NoReturn:
        raise NotImplementedError(f"{self.name!r}: its framework puts it back")

    def accept(self, value: Any) -> NoReturn:
        raise NotImplementedError(f"{self.name!r}: its framework puts it back")


class _NamedTensors(StateProvider):
    """Tensors by name, each contiguous in memory of its own. The framework that saved them restores them."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name)
        self._tensors = tensors

    def shards(self) -> Sequence[Shard]:
        try:  # one by one: tensors of one storage are written apart
            return [arrays.array_shard(keys.component(n), t, lazy=True) for n, t in self._tensors.items()]
        except TypeError as error:
            raise ProviderError(str(error)) from error


class TorchFiles:
    """Writes files in the background, and runs the ends of checkpoints (renames, removals, votes) in order.

    Used on one thread at a time. Threads and memory are allocated by the first file, and again after :meth:`close`.
    """

    def __init__(self, settings: FileSettings) -> None:
        """Take the settings; nothing is started yet."""
        self.settings = settings
        self.failures = 0
        """The number of checkpoints that have failed so far."""
        self.last_failed = False
        """Whether the checkpoint that ended last has failed. Set in the background, before the next work in order."""
        self._engine: Engine | None = None
        self._process = os.getpid()
        self._last: Task[None] | None = None
        self._saves: list[Task[None]] = []
        self._shown: set[str] = set()
        _all.add(self)

    def __reduce__(self) -> tuple[type[TorchFiles], tuple[FileSettings]]:
        """Make copies with the settings alone: threads, memory and files under way stay here."""
        return type(self), (self.settings,)

    def _start(self) -> Engine:
        if self._engine is not None:
            if os.getpid() != self._process:
                raise SnapshotAbandonedError("this process was forked from one that saves, so it cannot save")
            return self._engine
        # a thread for each file in flight: with fewer, the gate would wait for the storage of others
        self._engine = Engine(make_executor(self.settings), SoloWorld(), threads=1024, auto_gate=True)
        self._process = os.getpid()
        self._savers: dict[tuple[object, ...], Saver] = {}
        # one thread: checkpoints end in the order in which they began
        self._in_order = Workers("datastates-files", 1)
        return self._engine

    def begin(self) -> None:
        """Begin a checkpoint: wait until fewer than ``max_in_flight`` are under way.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint that the call waited for has failed; nothing is
                begun. Where several ranks save together, all of them raise at the same call.
        """
        self._start()
        while len(self._saves) >= self.settings.max_in_flight:
            self._tell(self._saves.pop(0).exception())

    def _tell(self, failure: BaseException | None) -> None:
        if failure is not None and self.settings.on_error == "raise":
            raise failure

    def prepare(self) -> None:
        """Allocate threads now, and the host cache as :func:`datastates.executor.make.prepare` does."""
        prepare(self._start().executor, self.settings)

    def write(self, kind: str, state: Any, path: Path, lazy: Lazy, *, attempt: str | None = None) -> Snapshot:
        """Begin to write a state dict as a file for ``torch.load``; returns once everything that is not lazy is copied.

        Args:
            kind: Names files that have the same structure in each checkpoint: they share a plan.
            state: Nested dicts, lists and tuples, with tensors in them.
            path: The file, under a temporary name.
            lazy: Chooses the tensors that are captured while training goes on.
            attempt: A name that all files of one checkpoint share; by default a new one.

        Raises:
            ProviderError: Something in ``state`` does not pickle; the message names it.
        """
        begin, provider = time.monotonic(), _StateDict(kind, state, lazy)
        attempt = attempt or secrets.token_hex(4)
        return self._take((_StateDict, kind), ContainerFraming(bare=True), provider, path, attempt, begin)

    def write_tensors(
        self, tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str], lazy: Lazy
    ) -> Snapshot:
        """Begin to write tensors as a safetensors file; returns once everything that is not lazy is copied.

        Args:
            tensors: The tensors by name.
            path: The file. Files of the same name in other folders have the same structure in each checkpoint.
            metadata: Further texts for the header, by name.
            lazy: Chooses the tensors that are captured while training goes on, by name and tensor.

        Raises:
            ProviderError: Tensors share memory, or the format cannot hold one; the message names it.
        """
        begin = time.monotonic()
        # a fingerprint begins on a word of the file: it may see nothing of a tensor that is smaller
        watched = {n for n, t in tensors.items() if t.nbytes >= _WORD and lazy(n, t)}
        own = {n: (t if n in watched else t.detach().clone()).contiguous() for n, t in tensors.items()}
        kind, provider = (_NamedTensors, path.name, *sorted(metadata.items())), _NamedTensors(path.name, own)
        return self._take(kind, SafetensorsFraming(metadata), provider, path, secrets.token_hex(4), begin)

    def _take(
        self, kind: tuple[Any, ...], framing: Framing, provider: StateProvider, path: Path, attempt: str, begin: float
    ) -> Snapshot:
        """Begin to write a file, with the plan of the last one of its kind if the structure is the same."""
        engine = self._start()
        if kind not in self._savers:
            self._savers[kind] = Saver(engine.executor, framing)
        return engine.take_file(self._savers[kind], [provider], Location(path), attempt=attempt, begin=begin)

    def then(
        self,
        name: str,
        snapshots: Sequence[Snapshot] | None,
        act: Callable[[BaseException | None], None],
        *,
        final: Path | None = None,
        older: re.Pattern[str] | None = None,
        room: Path | None = None,
    ) -> None:
        """Run ``act`` in the background, once the files are written and everything passed here before has run.

        It is run also if this call is interrupted.

        Args:
            name: The name of this work in the log.
            snapshots: Those of this rank's files of the checkpoint. None: ``act`` ends no checkpoint. Its failure is
                logged. If nothing is under way, it runs at once instead, and its failure is raised, too.
            act: Called with the error of a file, or None; it must raise that error. Its error is a failure of the
                checkpoint, which :meth:`begin` or :meth:`close` raises later.
            final: The file or folder that ``act`` names or removes. Code that looks at it waits until ``act`` has run.
            older: Matches names beside ``final`` that ``act`` may delete. Code that looks at these waits, too.
            room: The folder that hides it until then: code that lists it waits, too. By default beside ``final``.
        """
        ended, failures = Flag(), list[BaseException]()
        shown = None if final is None else looks.whole(final, lambda: self._see(ended, failures), older, room)

        def end() -> None:
            is_save = snapshots is not None
            try:
                with looks.unwatched():
                    wait_ended(snapshots or ())
                    self.last_failed |= is_save
                    act(next(filter(None, [snapshot.exception() for snapshot in snapshots or ()]), None))
                if is_save:
                    self.last_failed = False
            except BaseException as error:
                failures.append(error)
                self.failures += is_save
                raise
            finally:
                ended.set()
                if shown is not None:
                    looks.end(shown)
                if failures:  # after that: who looks may hold the lock of a handler
                    log.warning("%s has failed: %s", name, failures[0])

        if self._engine is None and snapshots is None:  # nothing is under way
            end()
            return
        self._start()
        task = Task(end)
        try:
            if snapshots is not None:
                self._saves.append(task)
            if shown is not None:
                looks.begin(shown)
            self._last = task
            self._in_order.put(task)
        except (ThreadStartError, ClosedError):
            if (call := task.take()) is not None:
                call()
        except BaseException:
            if (call := task.take()) is not None:  # the files are under way: ``act`` must follow them
                self._in_order.put(Work(call))
            raise

    def fail(self, name: str, error: BaseException) -> None:
        """Let a checkpoint that could not be begun count as failed; raises ``error`` with ``on_error="raise"``."""
        if self.settings.on_error == "raise":
            raise error

        def act(_: BaseException | None) -> None:
            raise error

        self.then(name, [], act)

    def _see(self, ended: Flag, failures: Sequence[BaseException]) -> BaseException | None:
        """Wait for a checkpoint's end, as code looks at it; returns why nothing may be deleted now, or None."""
        ended.wait()
        return failures[0] if failures and self.settings.on_error == "raise" else None

    def under_way(self, folder: os.PathLike[str]) -> list[Snapshot]:
        """The snapshots of the files that are being written into a folder."""
        in_flight = self._engine.pending() if self._engine is not None else []
        return [snapshot for snapshot in in_flight if Path(folder) in snapshot.path.parents]

    def give_up(self, pending: Pending) -> None:
        """Abandon a folder, if need be in the background, once the files that are being written into it have ended."""
        written = self.under_way(pending.directory)

        def abandon() -> None:
            wait_ended(written)
            for snapshot in written:
                snapshot.exception()  # nobody waits for the file any more
            pending.abandon()

        if written:
            self._in_order.do(abandon)
        else:
            abandon()

    def remove(self, path: Path) -> None:
        """Delete a checkpoint, once all begun before have ended; keep it if the last of them failed.

        Args:
            path: The file or folder.
        """

        def remove(_: BaseException | None) -> None:
            if self.last_failed:
                log.warning("%s is kept: what was saved after it has failed", path)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

        is_idle = self._last is None or self._last.done()
        self.then(f"removing {path}", None, remove, final=path)
        if is_idle:
            self.wait()

    def show(self, name: str, to: str) -> None:
        """Wait until everything begun has ended, because ``to`` looks at a checkpoint now. The log names it once.

        Raises as :meth:`close` does, each failure once.
        """
        if to not in self._shown:
            self._shown.add(to)
            log.warning("waiting for %s, and for later ones: %s", name, to)
        self.finish()

    def wait(self) -> None:
        """Wait until everything begun has ended; :meth:`begin` and :meth:`close` raise the failures.

        Raises:
            SnapshotAbandonedError: The process that this one was forked from was still saving.
        """
        if self._last is None or self._last.done():  # everything before has ended by then
            return
        if os.getpid() != self._process:
            raise SnapshotAbandonedError("this process was forked from one that was still saving")
        self._last.exception()

    def close(self) -> None:
        """Wait until everything begun has ended, and free threads and memory. Idempotent.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
        """
        if self._engine is None or os.getpid() != self._process:
            return
        self.wait()
        self._in_order.stop()
        self._in_order.join()
        self._engine.close()
        self._engine = self._last = None
        self.finish()

    def finish(self) -> None:
        """Wait until every checkpoint has ended; raises as :meth:`close` does, each failure once."""
        saves, self._saves = self._saves, []
        self._tell(next(filter(None, [save.exception() for save in saves]), None))


_all: weakref.WeakSet[TorchFiles] = weakref.WeakSet()


def wait_for_all() -> None:
    """As :meth:`TorchFiles.wait`, for all objects of this process: another one may be saving the file that is read."""
    for files in list(_all):
        files.wait()
