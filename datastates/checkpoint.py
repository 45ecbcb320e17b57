"""What users call: :class:`Checkpointer`, :func:`snapshot`, :func:`restore`, :func:`load` and :func:`open`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from datastates import arrays, directories, durable, gate, loading, manifest, restoring
from datastates.barrier import World, world_of
from datastates.committing import Ballot, meet
from datastates.config import IoSettings, RankSettings, Settings
from datastates.engine import Engine, Place, make_executor, take_one
from datastates.errors import (
    CheckpointNotFoundError,
    ClosedError,
    SettingsError,
    SnapshotRefusedError,
    SnapshotSkippedError,
)
from datastates.futures import Snapshot
from datastates.meeting import Meeting
from datastates.protocol import StateProvider
from datastates.reader import Checkpoint
from datastates.restoring import Restored, Verify
from datastates.saved import Trust
from datastates.stored import Stored

_log = logging.getLogger("datastates")

PathLike = str | os.PathLike[str]


_numbers = itertools.count()
"""Numbers what ranks do together outside of a :class:`Checkpointer`: all of them in the same order."""


def _world(settings: RankSettings, directory: Path) -> World:
    return world_of(settings.rank, settings.world_size, directory, settings.rank_timeout)


def _checked_step(step: Any) -> int:
    """A step from any integer, NumPy's too; TypeError or ValueError otherwise."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step: must be an integer, got {step!r:.40} ({type(step).__name__})")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise ValueError(f"step: {number} is not from 0 to 10**18 - 1")
    return number


def _checked_path(path: PathLike) -> Path:
    if not os.fspath(path):
        raise ValueError("the path of a checkpoint is empty")
    return Path(path).expanduser().absolute()


class Checkpointer:
    """Snapshots of one training run in one directory, and their restore.

    Its methods are called from the training thread; the snapshots it returns may be waited for from any.
    """

    def __init__(self, directory: PathLike, **options: Any) -> None:
        """Open a directory of checkpoints, creating it, and remove what interrupted runs left there.

        Args:
            directory: Where checkpoints go, one folder a step.
            **options: Fields of :class:`~datastates.config.Settings`.

        Raises:
            SettingsError: An option is unknown or impossible; the message names it.
            StorageError: The directory cannot be made or written.
        """
        self.settings = Settings.of(options)
        self.directory = _checked_path(directory)
        if self.settings.handle_sigterm and threading.current_thread() is not threading.main_thread():
            raise SettingsError("handle_sigterm: signals can only be handled from the main thread")
        durable.make_directory(self.directory)
        world = _world(self.settings, self.directory)
        self._name = f"checkpointer/{next(_numbers)}"
        try:
            meet(world, self._name, self.directory, self._clear_debris, timeout=self.settings.rank_timeout)
            executor = make_executor(self.settings)
        except BaseException:
            world.close()
            raise
        self._snapshots = itertools.count()
        self._restores = itertools.count()
        self._engine = Engine(executor, world, threads=self.settings.max_in_flight, auto_gate=self.settings.auto_gate)
        device = arrays.current_device()
        if device is not None and self.settings.host_cache != "auto":
            self._engine.executor.prepare(device, self.settings.host_cache)
        self._retention = threading.Lock()
        self._last_committed = (-1, -1)  # number and step, of those committed the snapshot that was taken last
        self._taken: list[Snapshot] = []
        self._closed = False
        self.failures = 0
        """How many snapshots have failed so far."""
        self._previous_handler: Any = None
        if self.settings.handle_sigterm:
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _clear_debris(self) -> None:
        for path in directories.debris(self.directory):
            _log.warning("removing what an interrupted run left: %s", path)
            directories.clear(path)

    # --- saving

    def snapshot(self, providers: Sequence[StateProvider], *, step: int) -> Snapshot:
        """Take a snapshot of all providers; returns as soon as what may change at any time has been copied.

        Lazy state (parameters, optimizer states) is captured while training goes on: every torch optimizer's ``step()``
        waits for that by itself, other updates must be guarded by :meth:`gate`.

        Args:
            providers: What makes the state.
            step: Its number, 0 or more. A step saved before is superseded once the new one is committed. The highest
                step is the newest: after a roll-back, delete the later ones or go on in another directory.

        Raises:
            DatastatesError: With ``on_error="raise"``, an earlier snapshot failed in the background; nothing is taken.
            SnapshotRefusedError: Too many are in flight and ``when_busy="refuse"``.
            ProviderError: Two shards have the same key, or an object does not pickle.
            ClosedError: The checkpointer is closed.
        """
        self._raise_if_closed()
        number = next(self._snapshots)
        ballot = Ballot(self._engine.world, f"{self._name}/snapshot/{number}", timeout=self.settings.rank_timeout)
        failure = None
        try:
            ballot.step = step = _checked_step(step)
            if (failure := self._failure()) is not None:
                raise failure
            begin = time.monotonic()
            self._wait_for_room()
            collected = self._engine.collect(providers)
            retain = partial(self._retain, number, step)
            taken = self._engine.take(collected, ballot, self._place(step), retain, begin=begin)
        except BaseException as error:
            told = error if failure is None else SnapshotSkippedError(f"an earlier failure was raised: {failure}")
            self._engine.decline(ballot, told)  # the other ranks are not to wait for this one
            raise
        self._taken.append(taken)
        return taken

    def _place(self, step: int) -> Place:
        if self._engine.world.size == 1:
            return Place.fixed(partial(directories.target, self.directory, step))
        # which revision it is, only the coordinator can say, and only when it commits
        expected = self.directory / directories.step_name(step)
        before = [s for s in self._taken if s.step == step]

        def final() -> Path:
            for snapshot in before:  # of two of one step the later one is to supersede the earlier
                snapshot.wait_ended()
            return directories.target(self.directory, step, in_flight=False)

        return Place(lambda: expected, final)

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

    def _retain(self, number: int, step: int) -> None:
        """Delete what the settings do not keep, once a snapshot has been committed; never the one taken last."""
        try:
            with self._retention:
                self._last_committed = max(self._last_committed, (number, step))
                for path in directories.superseded(self.directory):
                    directories.remove(path)
                if self.settings.keep_last is None:
                    return
                steps = directories.committed(self.directory)
                every = self.settings.keep_every
                for old in list(steps)[: -self.settings.keep_last]:
                    if old != self._last_committed[1] and (every is None or old % every):
                        directories.remove(steps[old])
        except OSError as error:
            _log.warning("an old checkpoint could not be deleted: %s", error)

    # --- restoring

    def restore(
        self,
        providers: Sequence[StateProvider],
        *,
        step: int | None = None,
        strict: bool = True,
        trust: Trust = (),
        verify: Verify = "checksum",
    ) -> Restored | None:
        """Restore the newest committed checkpoint, or that of ``step``, in place; all ranks call it together.

        It does not matter how many ranks saved it, nor how they shared it out: each rank reads the parts that it holds
        now. Keys, shapes and dtypes are all compared, on all ranks, before anything is changed. A damaged file is found
        while it is read: the error then names the tensor, and the state is partly overwritten.

        Args:
            providers: What to restore; providers in the checkpoint that are not named here are left alone.
            step: Which checkpoint; None for the newest.
            strict: Refuse missing, unexpected and mismatched keys; False restores what both sides have.
            trust: Classes that pickled objects may be of, as ``module.qualname``, or ``"all"``.
            verify: ``"digest"`` also compares the digest of every logical tensor, over all ranks, with the one that was
                saved. What is read without checksums, because little of it is wanted, is compared so in any case.

        Returns:
            The step, an int that also says what was left as it was, and what was read; None when there is none.

        Raises:
            RestoreError: The checkpoint and the live state do not fit, on this rank or another; nothing has changed.
            RanksMissingError: Other ranks did not come to restore in time.
            TrustError: An object needs a class that is not trusted; nothing has been changed.
            CorruptError, FormatError: A file is damaged.
            CheckpointNotFoundError: There is no checkpoint of that step.
        """
        self._raise_if_closed()
        wish = None if step is None else _checked_step(step)
        name = f"{self._name}/restore/{next(self._restores)}"
        meeting = Meeting(self._engine.world, name, self.settings.rank_timeout)
        gate.pass_all()  # restoring changes the state, too
        executor = self._engine.executor
        with contextlib.ExitStack() as reading:
            stored = restoring.open_together(meeting, wish, lambda: self._newest(wish), reading)
            if stored is None and wish is not None:
                raise CheckpointNotFoundError(f"no committed checkpoint of step {wish} in {self.directory}")
            if stored is None:
                return None
            return restoring.restore(
                stored,
                providers,
                lambda _: executor,
                meeting,
                strict=strict,
                trust=trust,
                verify=verify,
                replicas=self.settings.replicas,
            )

    def _newest(self, step: int | None) -> Path | None:
        """Where the checkpoint of a step stands, or the newest; None when there is none."""
        steps = directories.committed(self.directory)
        chosen = max(steps, default=None) if step is None else step
        return None if chosen is None else steps.get(chosen)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return list(directories.committed(self.directory))

    def latest(self) -> int | None:
        """The newest committed step, None when there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

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
        if self.settings.handle_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
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
        undelivered = [(s, error) for s in ended if (error := s.undelivered) is not None]
        # what another rank raised is not raised once more here: that would go back and forth for ever
        own = [error for _, error in undelivered if not isinstance(error, SnapshotSkippedError)]
        raised = own[0] if own and self.settings.on_error == "raise" else None
        for snapshot, error in undelivered:
            if error is not raised:
                _log.warning("snapshot %d failed: %s", snapshot.step, error)
        return raised

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self.wait()
        signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
        if callable(self._previous_handler):
            self._previous_handler(number, frame)
        else:
            os.kill(os.getpid(), number)


def snapshot(
    providers: Sequence[StateProvider], path: PathLike, *, step: int = 0, auto_gate: bool = True, **options: Any
) -> Snapshot:
    """Write one checkpoint directory at ``path``, which must not exist, without a :class:`Checkpointer`.

    Returns at once, as :meth:`Checkpointer.snapshot` does; the interpreter's exit waits for the commit.

    Args:
        providers: What makes the state.
        path: The directory that appears once the checkpoint is committed.
        step: A number to store with it.
        auto_gate: Let every torch optimizer's ``step()`` wait for capture.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Raises:
        FileExistsError: There is something at ``path``.
        SettingsError, ProviderError: As for :class:`Checkpointer`.
    """
    settings = RankSettings.of(options)
    target, step = _checked_path(path), _checked_step(step)
    world = _world(settings, target.parent)

    def prepare() -> None:
        if target.exists():
            raise FileExistsError(f"{target} exists, and is not written over: delete it or choose another path")
        for left in directories.debris_of(target):
            directories.clear(left)

    name = f"snapshot/{next(_numbers)}"
    try:
        meet(world, name, target, prepare, timeout=settings.rank_timeout)
        ballot = Ballot(world, f"{name}/commit", step=step, timeout=settings.rank_timeout)
        return take_one(settings, providers, world, ballot, Place.fixed(lambda: target), auto_gate=auto_gate)
    except BaseException:
        world.close()
        raise


def restore(
    path: PathLike,
    providers: Sequence[StateProvider],
    *,
    strict: bool = True,
    trust: Trust = (),
    verify: Verify = "checksum",
    **options: Any,
) -> Restored:
    """Restore one checkpoint in place: the mirror of :func:`snapshot`; all ranks call it together.

    Args:
        path: A checkpoint directory, or a directory of them: then the newest.
        providers: What to restore.
        strict: As for :meth:`Checkpointer.restore`, as are the errors.
        trust: As for :meth:`Checkpointer.restore`.
        verify: As for :meth:`Checkpointer.restore`.
        **options: Fields of :class:`~datastates.config.RankSettings`.
    """
    settings = RankSettings.of(options)
    given = _checked_path(path)
    several = given.is_dir() and not (given / manifest.FILE).exists()
    world = _world(settings, given if several else given.parent)  # beside a checkpoint, never in it
    meeting = Meeting(world, f"restore/{next(_numbers)}", settings.rank_timeout)
    gate.pass_all()
    try:
        with contextlib.ExitStack() as reading:
            stored = restoring.open_together(meeting, None, lambda: directories.find(given), reading)
            assert stored is not None
            return restoring.restore(
                stored,
                providers,
                lambda n: make_executor(settings, n),
                meeting,
                strict=strict,
                trust=trust,
                verify=verify,
                replicas=settings.replicas,
            )
    finally:
        world.close()


def load(path: PathLike, *, trust: Trust = (), **options: Any) -> dict[str, Any]:
    """Read a checkpoint as nested host arrays and objects, with no providers: ``{provider name: value}``.

    Args:
        path: A checkpoint directory, a directory of them (then the newest), or one container file.
        trust: As for :meth:`Checkpointer.restore`.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Raises:
        TrustError: An object needs a class that is not trusted.
        CorruptError, FormatError: The file is damaged.
        CheckpointNotFoundError: There is no committed checkpoint.
        ImportError: An element type needs torch or ml_dtypes and neither is installed.
    """
    settings = IoSettings.of(options)
    with directories.kept(_checked_path(path)) as found:
        return loading.load(found, lambda n: make_executor(settings, n), trust=trust)


def open(path: PathLike, **options: Any) -> Checkpoint:
    """Open a checkpoint to read single arrays: a mapping of full keys to host arrays, each read when it is asked for.

    Retention does not delete the checkpoint before it is closed. What several ranks saved is opened rank by rank, as it
    is needed.

    Args:
        path: As for :func:`load`.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Raises:
        FormatError: The file is damaged.
        CheckpointNotFoundError: There is no committed checkpoint.
    """
    settings = IoSettings.of(options)
    found = _checked_path(path)
    most = (settings.queue_depth + 1) * settings.block  # what one array after another keeps in flight
    with contextlib.ExitStack() as reading:
        path = reading.enter_context(directories.kept(found))
        stored = Stored.of_file(path) if path.is_file() else Stored.open(path)
        return Checkpoint(stored, lambda nbytes: make_executor(settings, min(nbytes, most)), reading.pop_all())
