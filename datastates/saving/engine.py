"""The engine: the executor, the background threads, and the snapshots in flight. All ways to save use it."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from datastates.commit import manifest
from datastates.commit.ballot import Ballot
from datastates.commit.ending import CheckpointEnding, Ending, FileEnding, identity_alone
from datastates.config import IoSettings
from datastates.errors import DeviceError, ProviderError, StorageError
from datastates.executor.executor import Executor
from datastates.executor.make import make_executor
from datastates.ranks.world import SoloWorld, World
from datastates.saving import gate
from datastates.saving.collect import Collected, collect
from datastates.saving.container_frame import ContainerFraming
from datastates.saving.running import Running
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot
from datastates.state.provider import StateProvider

_log = logging.getLogger("datastates")


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
    ) -> None:
        """Start an engine.

        Args:
            executor: The executor; :meth:`close` closes it.
            world: The ranks that save together; closing the engine closes it.
            threads: Number of snapshots that can be finished at the same time.
            auto_gate: Whether every torch optimizer's ``step()`` waits for capture.
            ended: Called, on a thread of the engine, with each committed snapshot, and with each failed one of
                :meth:`take` and :meth:`take_file`.
        """
        self.executor = executor
        self.world = world
        self._threads = threads
        self._auto_gate = auto_gate
        self._ended = ended
        self._start()
        _engines.add(self)

    def _start(self) -> None:
        world = self.world
        self._saver = Saver(self.executor, ContainerFraming(world.size), world.rank, world.size)
        # the pool's own exit hook lets running snapshots commit before the interpreter ends
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="datastates")
        # work that waits for other ranks must not occupy the threads that capture state
        self._aside = ThreadPoolExecutor(thread_name_prefix="datastates-aside")
        self._in_flight: list[Snapshot] = []
        self._left = 0  # number of tasks that are queued or running
        self._closing = False
        self._lock = threading.RLock()  # a signal handler may run in the thread that holds it

    def _after_fork(self) -> None:
        for snapshot in self._in_flight:
            snapshot.abandon()
        self._start()

    def collect(self, providers: Sequence[StateProvider]) -> Collected:
        """Collect what the providers describe. Cheap if they describe the same as for the last snapshot."""
        return self._saver.collect(providers)

    def take(
        self,
        collected: Collected,
        ballot: Ballot,
        expected: Callable[[], Path],
        target: Callable[[], Path],
        retain: Callable[[], None] = lambda: None,
        *,
        begin: float,
    ) -> Snapshot:
        """Take one snapshot. StorageError and DeviceError make the snapshot fail; other errors are raised.

        Args:
            collected: What the providers described.
            ballot: The agreement of the ranks that commits it.
            expected: Returns the path that is expected now. The partial directory lies beside it.
            target: Returns the path to commit to. Called on the coordinator at the commit.
            retain: Called on the coordinator after the commit, to delete old checkpoints.
            begin: When the user's call began, on the monotonic clock.

        Returns:
            The snapshot, in flight or failed.

        Raises:
            ProviderError: This rank is alone, without having been told to, and holds only a part of an array of JAX.
        """
        if isinstance(self.world, SoloWorld) and not self.world.by_wish and (key := collected.structure.in_part):
            raise ProviderError(
                f"{key!r} is held only in part by this process, which saves alone: jax.distributed is not, or no "
                "longer, initialized. Save before it is shut down, or give rank and world_size"
            )
        snapshot = Snapshot(ballot.step, collected.structure.nbytes, begin)

        def open_ending() -> Ending:
            snapshot.path = expected()
            pending = manifest.begin(snapshot.path, ballot.attempt)
            return CheckpointEnding(pending, ballot, target, retain)

        return self._take(self._saver, collected, snapshot, open_ending, ballot)

    def take_file(
        self, saver: Saver, providers: Sequence[StateProvider], path: Path, *, attempt: str, begin: float
    ) -> Snapshot:
        """Write a single file, whose identity names an ``attempt``; otherwise as :meth:`take`."""
        collected = saver.collect(providers)
        snapshot = Snapshot(0, collected.structure.nbytes, begin)
        snapshot.path = path
        ending = FileEnding(path, identity_alone(attempt))
        return self._take(saver, collected, snapshot, lambda: ending, ending)

    def _take(
        self,
        saver: Saver,
        collected: Collected,
        snapshot: Snapshot,
        open_ending: Callable[[], Ending],
        whom: Ballot | Ending,
    ) -> Snapshot:
        try:
            running = saver.begin(collected, snapshot, open_ending())
            with self._lock:
                self._in_flight.append(snapshot)  # before a fork or a signal can find it at the gate
            try:
                gate.guard(snapshot, automatic=self._auto_gate)
                self._submit(self._pool, self._begin_and_finish, snapshot, lambda: running)
            except BaseException as error:  # no thread, or the interpreter is ending: nobody must wait for the snapshot
                running.cancel(error)
                snapshot.exception()  # marks it as delivered, because it is raised here
                self._forget(snapshot)
                raise
        except (StorageError, DeviceError) as error:
            snapshot.fail(error)
            self.decline(whom, error)
            self._tell(snapshot)
        if self._auto_gate and gate.is_in_step():
            snapshot.pass_gate()
        snapshot.called()
        return snapshot

    def take_later(self, snapshot: Snapshot, begin: Callable[[], Running]) -> None:
        """Begin and finish a snapshot on a thread of the engine. If ``begin`` raises, the snapshot fails."""
        with self._lock:
            self._in_flight.append(snapshot)
        try:
            self._submit(self._pool, self._begin_and_finish, snapshot, begin)
        except BaseException as error:  # as in _take
            snapshot.fail(error)
            self._forget(snapshot)
            snapshot.exception()  # marks it as delivered, because it is raised here
            raise

    def _begin_and_finish(self, snapshot: Snapshot, begin: Callable[[], Running]) -> None:
        try:
            running = begin()
        except BaseException as error:  # the snapshot passes it to whoever waits
            snapshot.fail(error)
            self._forget(snapshot)
            return
        failure = running.run()
        self._forget(snapshot)
        if failure is not None:
            self.decline(running.ending, failure)
        self._tell(snapshot)

    def decline(self, whom: Ballot | Ending, error: BaseException) -> None:
        """Tell the other ranks, in the background, that this rank takes no part in a checkpoint."""
        if self.world.size > 1:
            self._aside_or_here(whom.decline, error)

    def _tell(self, snapshot: Snapshot) -> None:
        """Log a commit, and call ``ended``, away from the threads that capture state."""
        if snapshot.committed:
            _log.info("%s", snapshot.report)
        self._aside_or_here(self._ended, snapshot)

    def _aside_or_here(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            self.do_aside(work, *arguments)
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            work(*arguments)

    def _forget(self, snapshot: Snapshot) -> None:
        with self._lock:
            if snapshot in self._in_flight:  # an interrupted call may have removed it, and so may its thread
                self._in_flight.remove(snapshot)

    def do_aside(self, work: Callable[..., None], *arguments: object) -> None:
        """Run ``work``, which may wait for other ranks, on a thread that no capture needs."""
        self._submit(self._aside, work, *arguments)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: object) -> None:
        def do() -> None:
            try:
                work(*arguments)
            finally:
                self._done()

        with self._lock:
            self._left += 1
        try:
            pool.submit(do)
        except BaseException:
            self._done()
            raise

    def _done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._closing and not self._left
        if last:
            for pool in (self._pool, self._aside):
                pool.shutdown(wait=False)
            self.world.close()

    def pending(self) -> list[Snapshot]:
        """The snapshots in flight."""
        with self._lock:
            return [s for s in self._in_flight if not s.ended]

    def wait(self, fewer_than: int = 1) -> None:
        """Wait until fewer than so many snapshots are in flight; by default until there is none."""
        while len(pending := self.pending()) >= fewer_than:
            pending[0].wait_ended()

    def close(self) -> None:
        """Wait until no snapshot is in flight, then free threads and memory. An interrupted call can be repeated."""
        # wait here first: a pool whose shutdown is interrupted believes that its threads have ended
        self.wait()
        for pool in (self._pool, self._aside):  # in this order, because the first submits work to the second
            pool.shutdown(wait=True)
        self.executor.close()
        self.world.close()

    def close_later(self) -> None:
        """End the threads and close the world once all work in flight is done. No more snapshots may be taken."""
        with self._lock:
            self._closing = True
        self._submit(self._pool, lambda: None)


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
    target: Path,
    *,
    auto_gate: bool,
) -> Snapshot:
    """Take one snapshot with an engine of its own, which ends with the snapshot.

    Args:
        settings: How bytes move.
        providers: The state.
        world: The ranks; closed with the engine.
        ballot: The agreement of the ranks that commits the checkpoint.
        target: The path of the checkpoint.
        auto_gate: Whether every torch optimizer's ``step()`` waits for capture.
    """
    begin = time.monotonic()
    try:
        collected = collect(providers, rank=world.rank, ranks=world.size)
        executor = make_executor(settings, collected.structure.nbytes)
        engine = Engine(executor, world, threads=1, auto_gate=auto_gate)
        taken = engine.take(collected, ballot, lambda: target, lambda: target, begin=begin)
    except BaseException as error:
        ballot.decline(error)
        raise
    engine.close_later()
    return taken
