"""What users call: :class:`Checkpointer`, :func:`snapshot`, :func:`restore`, :func:`load` and :func:`open`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from datastates import arrays, directories, durable, gate, health, loading, manifest, paths
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
from datastates.executor import Executor
from datastates.fallback import check
from datastates.fallback import restore as restore_newest
from datastates.futures import Snapshot
from datastates.meeting import Meeting
from datastates.paths import PathLike
from datastates.protocol import StateProvider
from datastates.reader import Checkpoint
from datastates.restoring import Restored, Verify
from datastates.saved import Trust
from datastates.stored import Stored
from datastates.telling import refuse_to_meet, refuse_to_restore, telling
from datastates.termination import Termination

_log = logging.getLogger("datastates")


def _world(settings: RankSettings, directory: Path) -> World:
    return world_of(settings.rank, settings.world_size, directory, settings.rank_timeout)


def _world_beside(path: Path) -> Path:
    """Where ranks that restore meet: beside a checkpoint, never in it."""
    return path if path.is_dir() and not (path / manifest.FILE).exists() else path.parent


def _checked_step(step: Any) -> int:
    """A step from any integer, NumPy's too; TypeError or ValueError otherwise."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step: must be an integer, got {step!r:.40} ({type(step).__name__})")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise ValueError(f"step: {number} is not from 0 to 10**18 - 1")
    return number


def _meeting(world: World, name: str, timeout: float, attempt: int) -> Meeting:
    """Of the ranks that restore, at one of its attempts."""
    return Meeting(world, f"{name}/again/{attempt}" if attempt else name, timeout)


def _wished(
    meetings: Callable[[int], Meeting],
    providers: Sequence[StateProvider],
    step: Any,
    *,
    fallback: bool,
    strict: bool,
) -> int | None:
    """The step that is wanted; what is impossible is raised once the other ranks know of it."""
    try:
        _check_order(providers)
        wish = None if step is None else _checked_step(step)
        check(fallback=fallback, step=wish, strict=strict)
    except Exception as error:
        meetings(0).refuse(error)
    return wish


def _check_order(providers: Sequence[StateProvider]) -> None:
    """Refuse a path where providers belong."""
    if isinstance(providers, (str, bytes, os.PathLike)):
        raise TypeError(f"providers: got the path {providers!r:.80}; providers come first, then the path")


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

    def __init__(self, directory: PathLike, **options: Any) -> None:
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
            durable.make_directory(self.directory)
            executor = make_executor(self.settings)
        with contextlib.ExitStack() as undo:
            undo.callback(executor.close)
            world = _world(self.settings, self.directory)
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
        device = arrays.current_device()
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
        directories.sweep(self.directory)

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
            ballot.step = step = _checked_step(step)
            if (failure := self._failure()) is not None:
                raise failure
            _check_order(providers)
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

    def _retain(self) -> None:
        """Delete what the settings do not keep, once a snapshot has been committed; never the one taken last."""
        with self._retention, _warning():
            for path in self._outdated():
                with _warning():
                    directories.remove(path)

    def _outdated(self) -> list[Path]:
        last, every = self.settings.keep_last, self.settings.keep_every
        old = [] if last is None else list(directories.by_age(self.directory).items())[:-last]
        expired = [path for step, path in old if every is None or step % every]
        return directories.superseded(self.directory) + expired

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
            The step, an int that also says what was left as it was, and what was read; None when there is none.

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
        return _restore(
            self.directory,
            providers,
            partial(_meeting, self._engine.world, name, self.settings.rank_timeout),
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
    name = "snapshot"
    with telling(lambda: paths.local(path).parent, options, partial(refuse_to_meet, name)):
        settings = RankSettings.of(options)
        _check_order(providers)
        target, step = paths.local(path), _checked_step(step)
    world = _world(settings, target.parent)

    def prepare() -> None:
        if target.exists():
            raise FileExistsError(f"{target} exists, and is not written over: delete it or choose another path")
        for left in directories.debris_of(target):
            directories.clear(left)

    try:
        meet(world, name, target, prepare, timeout=settings.rank_timeout)
        sequence = partial(directories.next_sequence, target.parent)
        ballot = Ballot(world, f"{name}/commit", sequence, step=step, timeout=settings.rank_timeout)
        return take_one(settings, providers, world, ballot, Place.fixed(lambda: target), auto_gate=auto_gate)
    except BaseException:
        world.close()
        raise


def restore(
    providers: Sequence[StateProvider],
    path: PathLike,
    *,
    step: int | None = None,
    strict: bool = True,
    trust: Trust = (),
    verify: Verify = "checksum",
    fallback: bool = False,
    **options: Any,
) -> Restored:
    """Restore one checkpoint in place: the mirror of :func:`snapshot`; all ranks call it together.

    Args:
        providers: What to restore.
        path: A checkpoint directory, or a directory of them.
        step: Which of them; None for the newest.
        strict: As for :meth:`Checkpointer.restore`, as are the errors.
        trust: As for :meth:`Checkpointer.restore`.
        verify: As for :meth:`Checkpointer.restore`.
        fallback: As for :meth:`Checkpointer.restore`.
        **options: Fields of :class:`~datastates.config.RankSettings`.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
    """
    name = "restore"
    with telling(lambda: _world_beside(paths.local(path)), options, partial(refuse_to_restore, name)):
        settings = RankSettings.of(options)
        _check_order(providers)
        given = paths.local(path)
    with contextlib.closing(_world(settings, _world_beside(given))) as world:
        restored = _restore(
            given,
            providers,
            partial(_meeting, world, name, settings.rank_timeout),
            lambda n: make_executor(settings, n),
            step=step,
            fallback=fallback,
            strict=strict,
            trust=trust,
            verify=verify,
            replicas=settings.replicas,
        )
    if restored is None:
        directories.refuse_absence(given, None)
    return restored


def _restore(
    directory: Path,
    providers: Sequence[StateProvider],
    meetings: Callable[[int], Meeting],
    executor: Callable[[int], Executor],
    wait: Callable[[], None] = lambda: None,
    *,
    step: Any,
    fallback: bool,
    strict: bool,
    **how: Any,
) -> Restored | None:
    """What both ways to restore share. ``wait`` is called once the state may change, before anything is looked for."""
    wish = _wished(meetings, providers, step, fallback=fallback, strict=strict)
    gate.pass_all()  # restoring changes the state, too
    wait()
    restored = restore_newest(
        providers,
        lambda: directories.candidates(directory, wish),
        executor,
        meetings,
        step=wish,
        fallback=fallback,
        strict=strict,
        **how,
    )
    if restored is None and wish is not None:
        directories.refuse_absence(directory, wish)
    return restored


def load(path: PathLike, *, step: int | None = None, trust: Trust = (), **options: Any) -> dict[str, Any]:
    """Read a checkpoint as nested host arrays and objects, with no providers: ``{provider name: value}``.

    Args:
        path: A checkpoint directory, a directory of them, or one container file.
        step: Which of a directory of them, None for the newest; otherwise the step that it must be.
        trust: As for :meth:`Checkpointer.restore`.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Raises:
        TrustError: An object needs a class that is not trusted.
        CorruptError, FormatError: A file is damaged or missing; the message names an older checkpoint that looks whole.
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
        ImportError: An element type needs torch or ml_dtypes and neither is installed.
    """
    settings = IoSettings.of(options)
    with _kept(path, step) as found:
        return loading.load(found, lambda n: make_executor(settings, n), trust=trust)


@contextlib.contextmanager
def _kept(path: PathLike, step: int | None) -> Iterator[Path]:
    """What a path means, kept from deletion; an error that says that it is damaged names one that looks whole."""
    given, wish = paths.local(path), None if step is None else _checked_step(step)
    with directories.kept(given, wish) as found:
        if wish is not None and found.is_file() and (saved := Stored.of_file(found).head.step) != wish:
            raise CheckpointNotFoundError(f"{found} is of step {saved}, not of step {wish}")
        with (
            health.advice(found, "take it with step={step}")
            if found != given and wish is None
            else contextlib.nullcontext()
        ):
            yield found


def open(path: PathLike, *, step: int | None = None, **options: Any) -> Checkpoint:
    """Open a checkpoint to read single arrays: a mapping of full keys to host arrays, each read when it is asked for.

    Retention does not delete the checkpoint before it is closed. What several ranks saved is opened rank by rank, as it
    is needed.

    Args:
        path: As for :func:`load`.
        step: As for :func:`load`.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Raises:
        FormatError: The file is damaged; the message names an older checkpoint that looks whole.
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
    """
    settings = IoSettings.of(options)
    most = (settings.queue_depth + 1) * settings.block  # what one array after another keeps in flight
    with contextlib.ExitStack() as reading:
        found = reading.enter_context(_kept(path, step))
        stored = Stored.of_file(found) if found.is_file() else Stored.open(found)
        return Checkpoint(stored, lambda nbytes: make_executor(settings, min(nbytes, most)), reading.pop_all())
