"""The executor, the background threads, and the snapshots in flight: what both ways to save share."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from datastates import gate, manifest
from datastates.collecting import Collected, collect
from datastates.config import IoSettings
from datastates.errors import DeviceError, StorageError
from datastates.executor import Executor
from datastates.futures import Snapshot
from datastates.host_memory import automatic_cache
from datastates.protocol import StateProvider
from datastates.saving import Running, Saver


def make_executor(settings: IoSettings, nbytes: int | None = None) -> Executor:
    """An executor as set, or with no larger a cache than ``nbytes`` of state need."""
    cache = automatic_cache() if settings.host_cache == "auto" else settings.host_cache
    if nbytes is not None:
        cache = min(cache, -(-nbytes // settings.block) * settings.block)
    return Executor(
        host_cache=max(cache, 2 * settings.block),
        block=settings.block,
        queue_depth=settings.queue_depth,
        io_backend=settings.io_backend,
        direct_io=settings.direct_io,
        io_threads=settings.io_threads,
        device_cache=settings.device_cache,
    )


class Engine:
    """Takes snapshots with one executor and finishes them on threads of its own."""

    def __init__(self, executor: Executor, *, threads: int, auto_gate: bool) -> None:
        self.executor = executor
        self._threads = threads
        self._auto_gate = auto_gate
        self._start()
        _engines.add(self)

    def _start(self) -> None:
        self._saver = Saver(self.executor)
        # the pool's own exit hook lets running snapshots commit before the interpreter ends
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="datastates")
        self._in_flight: list[Snapshot] = []
        self._lock = threading.Lock()

    def _after_fork(self) -> None:
        for snapshot in self._in_flight:
            snapshot.abandon()
        self._start()

    def collect(self, providers: Sequence[StateProvider]) -> Collected:
        """What the providers describe; cheap where it is what they described for the last snapshot."""
        return self._saver.collect(providers)

    def take(
        self,
        collected: Collected,
        step: int,
        target: Callable[[], Path],
        retain: Callable[[], None] = lambda: None,
        *,
        begin: float,
    ) -> Snapshot:
        """Take one snapshot; storage and device failures land on it, errors in the providers are raised.

        Args:
            collected: What the providers described.
            step: Its number.
            target: Says where the checkpoint will stand.
            retain: Called once it is committed.
            begin: When the user's call began, on the monotonic clock.
        """
        snapshot = Snapshot(step, collected.structure.nbytes, begin)
        try:
            snapshot.path = target()
            running = self._begin(collected, snapshot, retain)
        except (StorageError, DeviceError) as error:
            snapshot.fail(error)
        else:
            with self._lock:
                self._in_flight.append(snapshot)
            gate.guard(snapshot, automatic=self._auto_gate)
            self._finish_later(snapshot, running)
        snapshot.called()
        return snapshot

    def _begin(self, collected: Collected, snapshot: Snapshot, retain: Callable[[], None]) -> Running:
        pending = manifest.begin(snapshot.path)
        try:
            return self._saver.begin(collected, snapshot, pending, retain)
        except BaseException:
            manifest.abandon(pending)
            raise

    def _finish_later(self, snapshot: Snapshot, running: Running) -> None:
        try:
            self._pool.submit(self._finish, snapshot, running)
        except BaseException as error:  # no thread, or the interpreter is ending: nobody may wait for it
            running.cancel(error)
            self._forget(snapshot)
            snapshot.exception()  # told by being raised
            raise

    def _finish(self, snapshot: Snapshot, running: Running) -> None:
        running.run()
        self._forget(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._in_flight.remove(snapshot)

    def pending(self) -> list[Snapshot]:
        """The snapshots in flight."""
        with self._lock:
            return [s for s in self._in_flight if not s.ended]

    def wait(self) -> None:
        """Wait until none is in flight."""
        while pending := self.pending():
            pending[0].wait_ended()

    def close(self) -> None:
        """Wait until none is in flight, and give threads and memory back. Interrupted, it can be called again."""
        # the pool's own wait must not be the one that is interrupted: it would take its threads for ended
        self.wait()
        self._pool.shutdown(wait=True)
        self.executor.close()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def take_one(
    settings: IoSettings, providers: Sequence[StateProvider], step: int, target: Callable[[], Path], *, auto_gate: bool
) -> Snapshot:
    """Take one snapshot with an engine of its own, which lasts until it has ended."""
    begin = time.monotonic()
    collected = collect(providers)
    engine = Engine(make_executor(settings, collected.structure.nbytes), threads=1, auto_gate=auto_gate)
    return engine.take(collected, step, target, begin=begin)
