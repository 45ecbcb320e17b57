"""The snapshots of one training run: :class:`Checkpointer`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from typing_extensions import Unpack

from datastates import _calls
from datastates._base import files, paths
from datastates._base.paths import PathLike
from datastates.commit import directories, retention
from datastates.commit.ballot import Ballot
from datastates.config import Options, Settings
from datastates.errors import (
    ClosedError,
    SettingsError,
    SnapshotRefusedError,
    SnapshotSkippedError,
)
from datastates.executor.make import make_executor
from datastates.ranks.together import meet
from datastates.restoring.provider_view import Trust
from datastates.restoring.restore import Verify
from datastates.restoring.restored import Restored
from datastates.restoring.telling import refuse_to_meet, telling
from datastates.saving.engine import Engine
from datastates.saving.snapshot import Snapshot
from datastates.saving.target import Target
from datastates.saving.termination import Termination
from datastates.state import streams
from datastates.state.provider import StateProvider

_log = logging.getLogger("datastates")


@contextlib.contextmanager
def _warning() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("an old checkpoint could not be deleted: %s", error)


class Checkpointer:
    """Snapshots of one training run in one directory, and their restore.

    Its methods are called from the training thread; the snapshots it returns may be waited for from any.
    """

    def __init__(self, directory: PathLike, **options: Unpack[Options]) -> None:
        """Open a directory of checkpoints, creating it, and remove what interrupted runs left there.

        Args:
            directory: Where checkpoints go, one folder a step.
            **options: Fields of :class:`~datastates.config.Settings`.

        Raises:
            SettingsError: An option is unknown or impossible; the message names it.
            StorageError: The directory cannot be made or written.
        """
        self._name = "checkpointer"
        with telling(lambda: paths.local(directory), options, partial(refuse_to_meet, self._name)):
            self.settings = Settings.of(options)
            self.directory = paths.local(directory)
            if self.settings.handle_sigterm and threading.current_thread() is not threading.main_thread():
                raise SettingsError("handle_sigterm: signals can only be handled from the main thread")
            files.make_directory(self.directory)
            executor = make_executor(self.settings)
        with contextlib.ExitStack() as undo:
            undo.callback(executor.close)
            world = _calls.open_world(self.settings, self.directory)
            undo.callback(world.close)
            meet(world, self._name, self.directory, self._clear_debris, timeout=self.settings.rank_timeout)
            undo.pop_all()
        self._snapshots = itertools.count()
        self._restores = itertools.count()
        self._engine = Engine(
            executor,
            world,
            threads=self.settings.max_in_flight,
            auto_gate=self.settings.auto_gate,
            ended=self._call_back,
        )
        device = streams.current_device()
        if device is not None and self.settings.host_cache != "auto":
            self._engine.executor.prepare(device, self.settings.host_cache)
        self._retention = threading.Lock()
        self._order = directories.Order(self.directory)
        self._taken: list[Snapshot] = []
        self._closed = False
        self.failures = 0
        """How many snapshots have failed so far."""
        self._termination = Termination(self._wait_for_these) if self.settings.handle_sigterm else None

    def _clear_debris(self) -> None:
        retention.sweep(self.directory)

    # --- saving

    def snapshot(self, providers: Sequence[StateProvider], *, step: int) -> Snapshot:
        """Take a snapshot of all providers; returns as soon as what may change at any time has been copied.

        Lazy state (parameters, optimizer states) is captured while training goes on: every torch optimizer's ``step()``
        waits for that by itself, other updates must be guarded by :meth:`gate`.

        Args:
            providers: What makes the state.
            step: Its number, 0 or more. A step saved before is superseded once the new one is committed. What is taken
                last is the newest, after a roll-back, too: the higher steps of before are then older.

        Raises:
            DatastatesError: With ``on_error="raise"``, an earlier snapshot failed in the background; nothing is taken.
            SnapshotRefusedError: Too many are in flight and ``when_busy="refuse"``.
            ProviderError: Two shards have the same key, or an object does not pickle.
            ClosedError: The checkpointer is closed.
        """
        self._raise_if_closed()
        number = next(self._snapshots)
        name, sequence = f"{self._name}/snapshot/{number}", partial(self._order.sequence, number)
        ballot = Ballot(self._engine.world, name, sequence, timeout=self.settings.rank_timeout)
        failure = None
        try:
            ballot.step = step = _calls.checked_step(step)
            if (failure := self._failure()) is not None:
                raise failure
            _calls.check_order(providers)
            begin = time.monotonic()
            self._wait_for_room()
            if self._termination is not None:
                self._termination.watch()
            collected = self._engine.collect(providers)
            taken = self._engine.take(collected, ballot, self._place(step), self._retain, begin=begin)
        except BaseException as error:
            told = error if failure is None else SnapshotSkippedError(f"an earlier failure was raised: {failure}")
            self._engine.decline(ballot, told)  # the other ranks are not to wait for this one
            raise
        self._taken.append(taken)
        return taken

    def _place(self, step: int) -> Target:
        if self._engine.world.size == 1:
            return Target.fixed(partial(directories.target, self.directory, step))
        # which revision it is, only the coordinator can say, and only when it commits
        expected = self.directory / directories.step_name(step)
        before = [s for s in self._taken if s.step == step]

        def final() -> Path:
            for snapshot in before:  # of two of one step the later one is to supersede the earlier
                snapshot.wait_ended()
            return directories.target(self.directory, step, in_flight=False)

        return Target(lambda: expected, final)

    def gate(self) -> contextlib.AbstractContextManager[None]:
        """Wait until the state may change; a call does it, and so does a ``with`` block around the update.

        Waits for capture only, never for storage. Where all that is left are copies on a GPU, the current streams are
        made to wait for them instead of the CPU.
        """
        for snapshot in self._engine.pending():
            snapshot.pass_gate()
        return contextlib.nullcontext()

    def _wait_for_room(self) -> None:
        while len(pending := self._engine.pending()) >= self.settings.max_in_flight:
            if self.settings.when_busy == "refuse":
                raise SnapshotRefusedError(f"{len(pending)} snapshots are in flight, as many as max_in_flight allows")
            pending[0].wait_ended()

    def _retain(self) -> None:
        """Delete what the settings do not keep, once a snapshot has been committed; never the one taken last."""
        with self._retention, _warning():
            for path in retention.outdated(self.directory, self.settings.keep_last, self.settings.keep_every):
                with _warning():
                    retention.remove(path)

    # --- restoring

    def restore(
        self,
        providers: Sequence[StateProvider],
        *,
        step: int | None = None,
        strict: bool = True,
        trust: Trust = (),
        verify: Verify = "checksum",
        fallback: bool = False,
    ) -> Restored | None:
        """Restore the newest committed checkpoint, or that of ``step``, in place; all ranks call it together.

        It first waits until no snapshot of this checkpointer is in flight, so it sees them all. One that failed is told
        as ever, by the next :meth:`snapshot` or by :meth:`close`.

        It does not matter how many ranks saved it, nor how they shared it out: each rank reads the parts that it holds
        now. Keys, shapes and dtypes are all compared, on all ranks, before anything is changed. A damaged file is found
        while it is read: the error then names the tensor, and the state is partly overwritten.

        Args:
            providers: What to restore; providers in the checkpoint that are not named here are left alone.
            step: Which checkpoint; None for the newest.
            strict: Refuse missing, unexpected and mismatched keys. False restores what both sides have. What is left
                out is logged as a warning, and is in ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys`` of
                what is returned; where nothing fits at all it is an error.
            trust: Classes that pickled objects may be of, as ``module.qualname``, or ``"all"``.
            verify: ``"digest"`` also compares the digest of every logical tensor, over all ranks, with the one that was
                saved. What is read without checksums, because little of it is wanted, is compared so in any case.
            fallback: Where the newest checkpoint is damaged, restore the newest that is not, on all ranks alike; a
                warning and ``passed_over`` of the result say so. Not with ``step``, nor with ``strict=False``.

        Returns:
            The step, what was left as it was, and what was read; None when there is no checkpoint.

        Raises:
            RestoreError: The checkpoint and the live state do not fit, on this rank or another; nothing has changed.
            CommitError: Another rank could not read, or a provider there could not take back, what it was given. The
                state may be partly overwritten by then.
            RanksMissingError: Other ranks did not come to restore in time.
            TrustError: An object needs a class that is not trusted; nothing has been changed.
            CorruptError, FormatError: A file is damaged; the message names an older checkpoint that looks whole.
            CheckpointNotFoundError: There is no checkpoint of that step.
        """
        self._raise_if_closed()
        name, executor = f"{self._name}/restore/{next(self._restores)}", self._engine.executor
        return _calls.restore_by(
            self.directory,
            providers,
            partial(_calls.meeting_of, self._engine.world, name, self.settings.rank_timeout),
            lambda _: executor,
            self.wait,  # what it finds must not depend on how fast the storage is
            step=step,
            fallback=fallback,
            strict=strict,
            trust=trust,
            verify=verify,
            replicas=self.settings.replicas,
        )

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending; those in flight are not among them, see :meth:`wait`."""
        return list(directories.committed(self.directory))

    def latest(self) -> int | None:
        """The committed step that was saved last, None when there is none; after a roll-back, not the highest."""
        return next(reversed(directories.by_age(self.directory)), None)

    # --- ending

    def wait(self) -> None:
        """Wait until no snapshot is in flight; failures stay for :meth:`snapshot` or :meth:`close` to raise."""
        self._engine.wait()

    def close(self) -> None:
        """Wait until every snapshot is committed, and give threads and memory back. Idempotent.

        Raises:
            DatastatesError: With ``on_error="raise"``, a snapshot failed and nobody has been told.
        """
        if self._closed:
            return
        self._engine.close()
        self._closed = True
        if self._termination is not None:
            self._termination.end()
        if (failure := self._failure()) is not None:
            raise failure

    def __enter__(self) -> Checkpointer:
        """The checkpointer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error of the block is not replaced by one of closing."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:
            _log.exception("a snapshot failed while another error was on its way")

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ClosedError(f"the checkpointer of {self.directory} is closed")

    def _failure(self) -> BaseException | None:
        """What failed in the background since the last time, and is to be raised; the rest is logged."""
        ended = [s for s in self._taken if s.ended]
        self._taken = [s for s in self._taken if not s.ended]
        self.failures += sum(s.failed for s in ended)
        undelivered = [(s, error) for s in ended if (error := s.deliver()) is not None]
        # what another rank raised is not raised once more here: that would go back and forth for ever
        own = [error for _, error in undelivered if not isinstance(error, SnapshotSkippedError)]
        raised = own[0] if own and self.settings.on_error == "raise" else None
        for snapshot, error in undelivered:
            if error is not raised:
                _log.warning("snapshot %d failed: %s", snapshot.step, error)
        return raised

    def _call_back(self, snapshot: Snapshot) -> None:
        """Call what the settings name for a snapshot that has ended."""
        call = self.settings.on_error if snapshot.failed else self.settings.on_commit
        if not callable(call):
            return
        if snapshot.failed:
            snapshot.deliver()
        try:
            call(snapshot)
        except Exception:  # of the user's; training is not to suffer from it
            _log.exception("%r raised, called for %r", call, snapshot)

    def _wait_for_these(self) -> None:
        """Wait for the snapshots that are in flight now, not for later ones."""
        for snapshot in self._engine.pending():
            snapshot.wait_ended()
