"""The engine: the executor, the background threads, and the snapshots in flight. All ways to save use it."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from datastates._base import log
from datastates._base.workers import Work, Workers
from datastates.commit.ballot import Ballot
from datastates.commit.ending import Ending, FileEnding, identity_alone
from datastates.config import IoSettings
from datastates.errors import CommitError, DeviceError, FencedError, ProviderError, StorageError, ThreadStartError
from datastates.executor.executor import Executor
from datastates.executor.make import make_executor
from datastates.ranks.world import SoloWorld, World, refuse_outdated, settle
from datastates.saving import gate
from datastates.saving.bases import Bases
from datastates.saving.collect import Collected, collect
from datastates.saving.container_frame import ContainerFraming
from datastates.saving.dry_run import describe, refuse_what_cannot_commit
from datastates.saving.running import Running
from datastates.saving.saver import Saver
from datastates.saving.snapshot import (
    Snapshot,
    abandon,
    called,
    error_of,
    fail,
    has_ended,
    pass_gate,
    wait_ended,
)
from datastates.saving.telling import Telling
from datastates.state.provider import StateProvider
from datastates.storage import store_of
from datastates.storage.location import Location

_MOST_ASIDE = 32
"""Largest number of threads for work that may wait for other ranks."""


class Engine:
    """Takes snapshots with one executor, and finishes them on its own threads.

    One thread at a time may call :meth:`collect` and :meth:`take`. In a forked child, the snapshots of the parent are
    abandoned, and the engine starts anew.
    """

    def __init__(
        self,
        executor: Executor,
        world: World,
        *,
        threads: int,
        auto_gate: bool,
        ended: Callable[[Snapshot], None] = lambda snapshot: None,
        bases: Bases | None = None,
    ) -> None:
        """Start an engine, without snapshots in flight.

        Args:
            executor: The executor; :meth:`close` closes it.
            world: The ranks that save together; closing the engine closes it.
            threads: Number of snapshots that can be finished at the same time.
            auto_gate: Whether every torch optimizer's ``step()`` waits for capture.
            ended: Called with each committed snapshot, and with each failed snapshot of :meth:`take` and
                :meth:`take_file`, on a thread of the engine: with one at a time, in the order in which they were taken.
            bases: What saves are compared with, so that only what differs is written; None: all is written.
        """
        self.executor = executor
        self.world = world
        self._threads = threads
        self._auto_gate = auto_gate
        self._ended = ended
        self._bases = bases
        self._place: tuple[Location, object] | None = None
        self._start()
        _engines.add(self)

    def _start(self) -> None:
        world = self.world
        self._saver = Saver(self.executor, ContainerFraming(claims=world.size > 1), world.rank, world.size, self._bases)
        self._pool = Workers("datastates", self._threads)
        # work that waits for other ranks must not occupy the threads that capture state
        self._aside = Workers("datastates-aside", _MOST_ASIDE)
        self._teller = Workers("datastates-teller", 1)  # nor must the user's functions
        self._telling = Telling(self._ended)
        self._closer: Workers | None = None
        # each change is one operation, which needs no lock: an interrupt could leave a lock taken
        self._in_flight: list[Snapshot] = []
        self._has_committed = False

    def _after_fork(self) -> None:
        for snapshot in self._in_flight:
            abandon(snapshot)
        self._start()

    def collect(self, providers: Sequence[StateProvider]) -> Collected:
        """Collect the providers' shards. This is cheap if their layouts are the same as for the last snapshot."""
        return self._saver.collect(providers)

    def check(self, providers: Sequence[StateProvider], name: str) -> None:
        """Find out with all ranks, which call this together, whether they could commit a state. Nothing is written.

        Args:
            providers: The state.
            name: A name that all ranks give to this check and to no other.

        Raises:
            CommitError: The ranks' parts do not make one state, or replicas differ, or another rank has failed.
        """
        refuse_outdated(self.world)
        error: Exception | None = None
        told = b""
        try:
            collected = collect(providers, rank=self.world.rank, ranks=self.world.size)
            told = describe(self.executor, collected, self.world.size).encode()
        except Exception as failure:  # the other ranks must not wait for this one
            error = failure
        settle(self.world, name, error, told, refuse_what_cannot_commit)

    def take(self, collected: Collected, ballot: Ballot, *, begin: float) -> Snapshot:
        """Take one snapshot. StorageError, DeviceError and FencedError make it fail; other errors are raised.

        Args:
            collected: The state, as the providers described it.
            ballot: The agreement of the ranks that commits the checkpoint.
            begin: When the user's call began, on the monotonic clock.

        Returns:
            The snapshot, in flight or failed.

        Raises:
            ProviderError: This rank saves alone without having been told to, and holds only a part of a JAX array or a
                DTensor.
            SettingsError: The ranks of torch.distributed or of jax.distributed have changed since the engine's world
                was opened.
        """
        refuse_outdated(self.world)
        if isinstance(self.world, SoloWorld) and not self.world.by_wish and (key := collected.structure.in_part):
            raise ProviderError(
                f"{key!r} is held only in part by this process, which saves alone: torch.distributed or "
                "jax.distributed is not, or no longer, initialized. Save before it is shut down, or give rank and "
                "world_size"
            )
        snapshot = Snapshot(ballot.step, collected.structure.nbytes, begin, ballot.target)
        return self._take(self._saver, collected, snapshot, ballot)

    def take_file(
        self, saver: Saver, providers: Sequence[StateProvider], path: Location, *, attempt: str, begin: float
    ) -> Snapshot:
        """Take a snapshot into a single file; otherwise as :meth:`take`.

        Args:
            saver: Plans and prepares the file.
            providers: The state.
            path: The file to write.
            attempt: The random name that the file's identity gets.
            begin: When the user's call began, on the monotonic clock.
        """
        collected = saver.collect(providers)
        snapshot = Snapshot(0, collected.structure.nbytes, begin, path)
        return self._take(saver, collected, snapshot, FileEnding(path, identity_alone(attempt)))

    def _take(self, saver: Saver, collected: Collected, snapshot: Snapshot, ending: Ending) -> Snapshot:
        try:
            running = saver.prepare(collected, snapshot, ending)
            work = Work(partial(self._finish, running))
            try:
                running.begin()
                self._in_flight.append(snapshot)  # before a fork or a signal can find the snapshot at the gate
                self._telling.expect(snapshot)
                gate.guard(snapshot, automatic=self._auto_gate)
                self._pool.put(work)
            except BaseException as error:
                if work.take() is not None:  # no thread will do the work: nobody must wait for the snapshot
                    try:
                        running.cancel(error)
                    finally:
                        self._telling.withdraw(snapshot)
                        self._forget(snapshot)
                raise
        except (StorageError, DeviceError, FencedError) as error:
            fail(snapshot, error)
            self.decline(ending, error)
            self._telling.expect(snapshot)
            self._tell(snapshot)
        except BaseException:
            snapshot.exception()  # it is raised here
            raise
        if self._auto_gate and gate.is_in_step():
            pass_gate(snapshot)
        called(snapshot)
        return snapshot

    def _finish(self, running: Running) -> None:
        try:
            failure = running.run()
        except BaseException as error:  # of what it does once it has failed
            fail(running.snapshot, error)
            failure = error
        self._forget(running.snapshot)
        if failure is not None:
            self.decline(running.ending, failure)
        self._tell(running.snapshot)

    def take_later(
        self, snapshot: Snapshot, begin: Callable[[], Running], give_up: Callable[[BaseException], None]
    ) -> None:
        """Let a thread of the engine begin and finish a snapshot.

        Args:
            snapshot: The snapshot.
            begin: Begins the snapshot, on the thread. If it raises, the snapshot fails.
            give_up: Called with the error if this method raises and no thread has taken the snapshot.
        """
        work = Work(partial(self._begin_and_finish, snapshot, begin))
        try:
            self._in_flight.append(snapshot)
            self._pool.put(work)
        except BaseException as error:
            if work.take() is not None:
                fail(snapshot, error)
                snapshot.exception()  # it is raised here
                self._forget(snapshot)
                give_up(error)
            raise

    def _begin_and_finish(self, snapshot: Snapshot, begin: Callable[[], Running]) -> None:
        try:
            running = begin()
        except BaseException as error:  # the snapshot passes it to whoever waits
            fail(snapshot, error)
            self._forget(snapshot)
            return
        self._finish(running)

    def decline(self, ending: Ending, error: BaseException) -> None:
        """Tell the other ranks, in the background, that this rank takes no part in a checkpoint."""
        if self.world.size > 1:
            _do_or_here(self._aside, partial(ending.decline, error))

    def _tell(self, snapshot: Snapshot) -> None:
        """Log a commit, and call ``ended``, away from the threads that capture state."""
        _do_or_here(self._teller, partial(self._log_and_tell, snapshot))

    def _log_and_tell(self, snapshot: Snapshot) -> None:
        if snapshot.committed and log.shows_info():
            log.info("%s", snapshot.report)
        elif isinstance(error := error_of(snapshot), CommitError) and not self._has_committed:
            # later ones will probably fail in the same way, and nobody may ask for a long time
            log.error("snapshot %d failed, and none was committed before: %s", snapshot.step, error)
        self._has_committed |= snapshot.committed
        self._telling.tell()

    def _forget(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(ValueError):  # another thread has done it
            self._in_flight.remove(snapshot)

    def do_aside(self, work: Callable[..., None], *arguments: object) -> None:
        """Run ``work``, which may wait for other ranks, on a thread that no capture needs."""
        self._aside.do(partial(work, *arguments))

    def pending(self) -> list[Snapshot]:
        """The snapshots in flight."""
        return [snapshot for snapshot in self._in_flight.copy() if not has_ended(snapshot)]

    def wait(self, fewer_than: int = 1) -> None:
        """Wait until fewer than ``fewer_than`` snapshots are in flight; by default until none is."""
        while len(pending := self.pending()) >= fewer_than:
            wait_ended(pending[:1])

    def saves_in(self, root: Location) -> None:
        """Note the directory, for :meth:`wait_in_place`; raises StorageError if it cannot be looked at."""
        found = store_of(root).look(root)
        # the file system's name, as the directory may have several paths; a store of objects has none
        self._place = root, (found and found.place) or root

    def wait_in_place(self) -> None:
        """Wait until the state may change, and no engine of this process has a snapshot in flight in the directory.

        For a restore: what was saved is no base any more, as it may turn out to be damaged.
        """
        gate.pass_all()
        assert self._place is not None
        root, place = self._place
        for other in list(_engines):
            if other._place is not None and (other._place[0] == root or other._place[1] == place):
                other.wait()
        if self._bases is not None:
            self._bases.restored(None)

    def restored(self, find: Callable[[], Location | None]) -> None:
        """Note what the state was restored from, if saves are compared with it. None: with nothing."""
        if self._bases is not None:
            self._bases.restored(find())

    def is_own_thread(self) -> bool:
        """Whether a thread of the engine calls this, as in ``ended``. Such a thread cannot wait for its own end."""
        return self._pool.is_current() or self._teller.is_current()

    def close(self) -> None:
        """Wait until no snapshot is in flight, then free threads and memory. An interrupted call can be repeated."""
        if self._closer is not None:
            self._closer.join()
        self._close()

    def close_later(self) -> None:
        """Close as :meth:`close` does, in the background."""
        if self._closer is None:
            closer, work = Workers("datastates-close", 1), Work(self._close)
            try:
                closer.put(work)
            except ThreadStartError:
                self._close()
            except BaseException:
                if work.take() is not None:
                    closer.do(self._close)
                raise
            finally:
                closer.stop()
            self._closer = closer

    def _close(self) -> None:
        self.wait()
        for workers in (self._pool, self._aside, self._teller):  # the pool first, because it hands work to the others
            workers.stop()
            workers.join()
        self.executor.close()
        self.world.close()


def _do_or_here(workers: Workers, call: Callable[[], None]) -> None:
    try:
        workers.do(call)
    except ThreadStartError:
        call()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def take_one(
    settings: IoSettings,
    providers: Sequence[StateProvider],
    world: World,
    ballot: Ballot,
    *,
    auto_gate: bool,
) -> Snapshot:
    """Take one snapshot with an engine of its own, which ends with the snapshot.

    Args:
        settings: Settings of I/O.
        providers: The state.
        world: The ranks that save together; closed with the engine.
        ballot: The agreement of the ranks that commits the checkpoint.
        auto_gate: Whether every torch optimizer's ``step()`` waits for capture.
    """
    begin = time.monotonic()
    with contextlib.ExitStack() as at_end:
        at_end.callback(world.close)
        try:
            collected = collect(providers, rank=world.rank, ranks=world.size)
            executor = make_executor(settings, collected.structure.nbytes)
            engine = Engine(executor, world, threads=1, auto_gate=auto_gate)
            at_end.pop_all()
            at_end.callback(engine.close_later)
            return engine.take(collected, ballot, begin=begin)
        except BaseException as error:
            ballot.decline(error)
            raise
