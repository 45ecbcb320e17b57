""":class:`Checkpointer`, which takes the snapshots of one training run and restores them."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from typing_extensions import Unpack

from datastates._base import log
from datastates.commit import newest
from datastates.commit.names import Metric, checked_metric, checked_step
from datastates.config import Options, Settings
from datastates.draining.place import Place
from datastates.errors import (
    ClosedError,
    SettingsError,
    SnapshotRefusedError,
    SnapshotSkippedError,
    SnapshotTimeoutError,
)
from datastates.executor.make import make_executor, prepare
from datastates.formats import recognise
from datastates.ranks.world import open_world, refuse_outdated
from datastates.restoring import requested
from datastates.restoring.meeting import attempts, refuse_to_meet, telling
from datastates.restoring.request import RestoreOptions
from datastates.restoring.restored import Restored, whole_in
from datastates.saving.bases import bases_of
from datastates.saving.engine import Engine
from datastates.saving.run_trace import RunTrace
from datastates.saving.snapshot import Snapshot, follow, pass_gate, wait_ended
from datastates.saving.telling import Taken, call_back
from datastates.schedule.due import Costs, Due
from datastates.schedule.termination import LastSnapshot, Termination
from datastates.state.provider import StateProvider, refuse_path
from datastates.storage.location import Location, PathLike


class Checkpointer:
    """Takes snapshots of one training run in one directory, and restores them.

    With several ranks, each rank makes a checkpointer for the same directory. The n-th :meth:`snapshot` calls of all
    ranks make one checkpoint, and their n-th :meth:`restore` calls make one restore. Use it as a context manager, or
    call :meth:`close`.

    Not thread-safe: call the methods on the training thread. The snapshots that it returns are thread-safe.

    Attributes:
        settings: The settings, a :class:`~datastates.config.Settings`.
        directory: The absolute path of the directory, or the address of a place in a store, as a string.
    """

    def __init__(self, directory: PathLike, **options: Unpack[Options]) -> None:
        """Open a directory of checkpoints. Create it if needed. The first snapshot removes debris of interrupted runs.

        Args:
            directory: The directory of the checkpoints, or an address such as ``"s3://bucket/run"``. Each checkpoint
                is a directory in it.
            **options: Fields of :class:`~datastates.config.Settings`.

        Raises:
            SettingsError: An option is unknown or impossible; the message names it.
            StorageError: The directory cannot be made or written.
            TypeError, ValueError: ``directory`` is not a path, or no store serves it, or it is itself a checkpoint, of
                this package or of another format.
            CommitError: Another rank failed, or the ranks gave different directories.
            RanksMissingError: Some ranks did not come within ``rank_timeout`` seconds.
        """
        self._name = "checkpointer"
        with telling(lambda: Location.of(directory), options, partial(refuse_to_meet, self._name)):
            self.settings = Settings.of(options)
            self._root = Location.of(directory)
            self.directory = self._root.face
            if self.settings.handle_sigterm and threading.current_thread() is not threading.main_thread():
                raise SettingsError("handle_sigterm: signals can only be handled from the main thread")
            recognise.refuse_checkpoint(self._root)
            self._place = Place(self._root, self.settings)
            executor = make_executor(self.settings)
        with contextlib.ExitStack() as undo:
            undo.callback(executor.close)
            world = open_world(self.settings, self._root)
            undo.callback(world.close)
            self._place.open(world, self._name, lambda: bool(self._engine.pending()))
            undo.pop_all()
        self._snapshots, self._restores, self._checks = 0, itertools.count(), itertools.count()
        own, bases = self.settings, bases_of(self.settings, world.rank, world.size)
        self._engine = Engine(
            executor, world, threads=own.max_in_flight, auto_gate=own.auto_gate, ended=self._ended, bases=bases
        )
        prepare(executor, own)
        self._trace, self._closed = RunTrace(), False
        self._taken = Taken(raises=own.on_error == "raise", ended=self._trace.add_snapshot)
        self._costs = Costs(self.settings.max_in_flight)
        self._due = Due(self.settings, self._costs.interval, world, f"{self._name}/due")
        self._last = LastSnapshot(self.settings.grace, self._costs.seconds_until_durable, world, f"{self._name}/last")
        self._termination = Termination(partial(self._last.hold, self._finish)) if own.handle_sigterm else None
        self._engine.saves_in(self._root)

    @property
    def failures(self) -> int:
        """Number of failed snapshots, as counted at the last :meth:`snapshot` or :meth:`close`."""
        return self._taken.failures

    # --- saving

    def snapshot(self, providers: Sequence[StateProvider], *, step: int, metric: Metric = None) -> Snapshot:
        """Take a snapshot of all providers. It returns when everything that is not lazy has been copied.

        Lazy state, such as parameters and optimizer states, is captured while training continues. Every torch
        optimizer's ``step()`` waits for the capture, unless ``auto_gate=False``. Guard all other updates of lazy state
        with :meth:`gate`.

        If ``max_in_flight`` snapshots are in flight, the call first waits until one has ended.

        Args:
            providers: The state, one provider for each piece of it. Their names must differ.
            step: The number of the training step, from 0 to 10**18 - 1. If the step was saved before, the new
                checkpoint supersedes the old one when it is committed. The newest checkpoint is the one taken last, not
                the one of the highest step: after a roll-back, earlier checkpoints of higher steps are older.
            metric: A number that says how good the checkpoint is, also of NumPy or torch, for ``keep_best`` and ``ls``.
                NaN and an infinity mean None. Rank 0's counts; other ranks' are ignored. One on a GPU is waited for.

        Returns:
            The snapshot. Failures of storage, of devices or of other ranks make it fail, and are not raised here. So
            does a newer run that has begun to save in the directory, at first: see FencedError.

        Raises:
            DatastatesError: With ``on_error="raise"``, an earlier snapshot failed in the background. Its error, of
                whatever class, is raised once, and no snapshot is taken. On the other ranks, this snapshot fails with
                SnapshotSkippedError, which is logged.
            SnapshotRefusedError: Too many snapshots are in flight, and ``when_busy="refuse"``.
            ProviderError: A provider describes its state wrongly, or an object does not pickle.
            TypeError, ValueError: ``providers``, ``step`` or ``metric`` is impossible.
            SettingsError: The ranks of the framework have changed since the checkpointer was made.
            FencedError: A newer run has begun to save in the directory, and a snapshot has failed of it. On the other
                ranks, this snapshot fails.
            ClosedError: The checkpointer is closed.
        """
        self._raise_if_closed()
        number = self._snapshots
        before: list[Snapshot] = []
        name, ready = f"{self._name}/snapshot/{number}", partial(wait_ended, before)
        ballot = self._place.ballot(self._engine.world, name, self._place.run, number=number, ready=ready)
        failure = None
        try:
            self._snapshots = number + 1  # all ranks count the same: an interrupt before this is one before the call
            ballot.step = step = checked_step(step)
            ballot.metric = None if metric is None else checked_metric(metric)
            if (failure := self._taken.failure()) is not None:
                raise failure
            self._place.opening.refuse_if_known_fenced()
            refuse_path(providers)
            begin = time.monotonic()
            self._wait_for_room()
            if self._termination is not None:
                self._termination.watch()
            if self._engine.world.size > 1:  # these end first, so that this one supersedes them
                before += [one for one in self._taken.snapshots if one.step == step]
            collected = self._engine.collect(providers)
            taken = self._engine.take(collected, ballot, begin=begin)
        except BaseException as error:
            if self._snapshots > number:
                told = error if failure is None else SnapshotSkippedError(f"an earlier failure was raised: {failure}")
                self._engine.decline(ballot, told)  # so that the other ranks do not wait for this one
            raise
        self._taken.snapshots.append(taken)
        self._costs.note(taken)
        self._last.settle()
        self._place.drains.begin()
        follow(taken, self._place.places)
        return taken

    def check(self, providers: Sequence[StateProvider]) -> None:
        """Find out whether a snapshot of these providers could be committed. All ranks call it together.

        It describes the state and serializes its objects as :meth:`snapshot` does, and compares the ranks' parts and
        digests. It writes nothing. Call it after the first training step: optimizers then have their states.

        Raises:
            CommitError: The ranks' parts do not make one state, an array differs that one rank writes for several, or
                another rank has failed. Same text on all ranks.
            ProviderError: A provider describes its state wrongly, or an object does not pickle.
            RanksMissingError: Some ranks did not come within ``rank_timeout`` seconds.
        """
        self._raise_if_closed()
        self._engine.check(providers, f"{self._name}/check/{next(self._checks)}")

    def due(self, step: int) -> bool:
        """Whether to take a snapshot after ``step``, as the setting ``every`` says. Call it once after each step.

        With ``every="auto"``, the first call answers True, so that a snapshot is measured. All ranks get the same
        answers, if all call it after the same steps. They then meet at a few of these steps. After SIGTERM, with the
        setting ``grace``, one of the next calls answers True if a last snapshot can be durable in time. The log says
        which.

        Args:
            step: The number of the training step. It grows, but may fall back after a restore.

        Raises:
            SettingsError: ``every`` is not set.
            CommitError: The ranks asked about different steps.
            RanksMissingError: Some ranks did not ask within ``rank_timeout`` seconds.
            TypeError, ValueError: ``step`` is impossible.
            ClosedError: The checkpointer is closed.
        """
        self._raise_if_closed()
        step = checked_step(step)
        return self._last.is_due(step) or self._due(step)

    def seconds_until_durable(self) -> float | None:
        """Seconds until a snapshot that is taken now would be committed, from the last snapshots' rates. Thread-safe.

        It is None until a snapshot of this checkpointer has been committed. The rest of the snapshots in flight counts.
        """
        return self._costs.seconds_until_durable()

    def gate(self) -> contextlib.AbstractContextManager[None]:
        """Wait until the state may change. Call it before an update, or write ``with checkpointer.gate():`` around it.

        The call itself waits; the block adds nothing. It waits only for the capture of the snapshots in flight. If only
        copies from a GPU are left, it makes the current CUDA streams wait for them, and the CPU does not wait.

        Returns:
            A context manager that does nothing.
        """
        for snapshot in self._engine.pending():
            pass_gate(snapshot)
        return contextlib.nullcontext()

    def _wait_for_room(self) -> None:
        most = self.settings.max_in_flight
        if self.settings.when_busy == "refuse" and len(pending := self._engine.pending()) >= most:
            raise SnapshotRefusedError(f"{len(pending)} snapshots are in flight, as many as max_in_flight allows")
        self._engine.wait(1 if self._place.run.is_full else most)

    # --- restoring

    def restore(self, providers: Sequence[StateProvider], **request: Unpack[RestoreOptions]) -> Restored | None:
        """Restore the newest committed checkpoint, or the newest of ``step``, in place. All ranks call it together.

        The call first waits until this process has no snapshot in flight in the directory, so that it finds all of
        them. Errors of failed snapshots are not raised here, but by the next :meth:`snapshot` or by :meth:`close`.

        The number of ranks and the parts that each rank holds may have changed since the save. Each rank reads the
        parts that it holds now. Keys, shapes and dtypes are compared on all ranks before any state is changed. Damaged
        array data is found only while it is read. The error then names the tensor, and the state is partly overwritten.

        Args:
            providers: The state to restore. Providers in the checkpoint that are not among these are left out.
            **request: Fields of :class:`~datastates.RestoreRequest`: ``step``, ``keys``, ``rename``, ``cast``,
                ``strict``, ``trust``, ``verify`` and ``fallback``.

        Returns:
            The result of the restore; None if there is no checkpoint. If one lies there under another name, or of
            another format, a warning names it.

        Raises:
            RestoreError: The checkpoint does not fit the live state, on this rank or another, or another rank could not
                begin. No state has been changed.
            CommitError: Another rank failed while it read or while a provider took back its objects. The state may be
                partly overwritten.
            RanksMissingError: Other ranks did not come within ``rank_timeout`` seconds.
            TrustError: An object needs a class that is not trusted. No state has been changed.
            CorruptError: Data does not match its checksum or digest; the message names the tensor or object.
            FormatError: A file is damaged. Without ``step``, the message of this and similar errors names an older
                checkpoint that looks whole.
            StorageError: A file is missing or cannot be read.
            DeviceError: A copy to a GPU failed.
            CheckpointNotFoundError: There is no checkpoint of ``step``.
            SettingsError: As for :meth:`snapshot`.
            TypeError, ValueError: An argument is impossible.
            ClosedError: The checkpointer is closed.
        """
        self._raise_if_closed()
        refuse_outdated(self._engine.world)
        name, executor = f"{self._name}/restore/{next(self._restores)}", self._engine.executor
        restored = requested.restore(
            newest.Given(self._place.listing),
            providers,
            request,
            attempts(self._engine.world, name),
            lambda _: executor,
            # so that the checkpoint it finds does not depend on the speed of the storage
            wait=self._engine.wait_in_place,
            prove=self._place.opening.refuse_elsewhere,  # what lies below a lost mount is not the newest
        )
        if restored is not None:
            self._trace.add_restore(restored.step, restored.spans)
            self._engine.restored(partial(whole_in, restored))
            self._place.restored(Location(restored.path), name)
        elif (step := request.get("step")) is not None:
            recognise.refuse_absence(self._root, step)
        elif self._engine.world.rank == 0:
            recognise.warn_of_other(self._root)
        return restored

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, ascending. Snapshots in flight do not count; see :meth:`wait`."""
        self._place.opening.refuse_elsewhere()
        return list(newest.committed(self._place.listing))

    def latest(self) -> int | None:
        """The step of the newest committed checkpoint, None if there is none. After a roll-back, not the highest."""
        self._place.opening.refuse_elsewhere()
        return next(reversed(newest.by_certain_age(self._place.listing)), None)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of the run so far on this rank, in the format that https://ui.perfetto.dev and Chrome show.

        It has the snapshots, the restores and their stages, less detailed than :meth:`Snapshot.trace`, the training
        thread's waits and, from the first snapshot on, unless ``auto_gate=False``, the times from one torch optimizer's
        ``step()`` to the next. A long run forgets its oldest work; the trace says how many spans.

        Args:
            path: The file to write. An existing file is replaced. After :meth:`close`, all snapshots are in it.

        Raises:
            OSError: ``path`` cannot be written.
        """
        self._trace.write(path, f"datastates, {self._root}", self._taken.snapshots)

    def wait(self) -> None:
        """Wait until no snapshot is in flight. Errors are not raised here, but by :meth:`snapshot` or :meth:`close`."""
        self._engine.wait()

    def wait_drained(self, timeout: float | None = None) -> None:
        """Wait until every committed checkpoint is in all tiers of the setting ``tiers`` that keep it. Thread-safe.

        On other ranks than 0, wait until this rank has sent its part.

        Raises:
            SnapshotTimeoutError: ``timeout`` seconds passed first, or :meth:`close` has given up. The message says why
                the last try has failed.
            FencedError: A newer run has begun to save in one of the tiers.
        """
        if rest := self._place.wait(timeout):
            raise SnapshotTimeoutError(f"not all checkpoints were brought to {rest}")

    def close(self) -> None:
        """Wait until every snapshot is committed or has failed, then free threads and memory. Idempotent.

        With ``tiers``, it also brings what is due to them. It does not wait for a tier that fails: a later run, or
        ``datastates drain``, goes on.

        An interrupted call can be repeated. Called by ``on_commit`` or ``on_error``, it returns at once: no snapshot
        can be taken any more, and all else happens in the background. A later call on the training thread waits for
        that.

        Raises:
            DatastatesError: With ``on_error="raise"``, a snapshot failed and its error, of whatever class, was not
                delivered yet. The checkpointer is closed all the same. Not in ``on_commit`` or ``on_error``.
        """
        if self._engine.is_own_thread():
            self._closed = True
            self._engine.close_later()
            return
        self._last.end()
        self._engine.wait()
        self._closed = True  # from here on, a call that is interrupted leaves only close() to be called again
        self._place.close(self._engine.close)
        if self._termination is not None:
            self._termination.end()
        if (failure := self._taken.failure()) is not None:
            raise failure

    def __enter__(self) -> Checkpointer:
        """Return the checkpointer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the checkpointer. If the block raised an error, an error of closing is only logged."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:
            log.error("a snapshot failed while another error was on its way", of=failure)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ClosedError(f"the checkpointer of {self._root} is closed")

    def _ended(self, snapshot: Snapshot) -> None:
        self._place.ended(snapshot)
        call_back(self.settings, snapshot)

    def _finish(self, end: float | None) -> None:
        """After SIGTERM, wait for the snapshots that are in flight now, and bring the newest to the further tiers."""
        wait_ended(self._engine.pending())
        self._place.hurry(end)
