"""The future that ``snapshot()`` returns."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from datastates.errors import DatastatesError, SnapshotAbandonedError, SnapshotTimeoutError
from datastates.executor.timeline import Span, chrome_trace, stages
from datastates.saving.report import STATES, Report

_log = logging.getLogger("datastates")

_silent: set[Snapshot] = set()
"""Snapshots whose failure nobody has been told."""


@atexit.register
def _tell_at_exit() -> None:
    for snapshot in _silent:
        _log.error("snapshot %d failed, and nobody asked: %s", snapshot.step, snapshot._error)
    if _silent and sys.stderr is not None:
        sys.stderr = cast("TextIO", _FailedStream(sys.stderr))


class _FailedStream:
    """The standard error stream of a process that has failed: the interpreter's own flush, its last, raises.

    The process then ends with status 120, and everything else ends as it would. ``os._exit`` would cut off the exit
    functions of others.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys._getframe().f_back is None:  # nobody else calls it from outside of Python
            raise OSError("a snapshot failed, and nobody asked")


def _forget_frames(error: BaseException, *, log: bool) -> None:
    """Drop the frames that an error passed through, as they hold the training state; log them if they are of use."""
    if log and not isinstance(error, DatastatesError):
        _log.error("a snapshot failed", exc_info=error)
    seen: set[int] = set()  # an error that was told to other ranks may be the cause of its own context
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(error, DatastatesError):
            link.__traceback__ = None
        else:
            traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class Snapshot:
    """One checkpoint on its way: captured, then persisted, then committed. Thread-safe.

    - *captured*: the training state may change again;
    - *persisted*: this process's bytes are on stable storage;
    - *committed*: the checkpoint is complete, and what ``restore()`` finds.
    """

    def __init__(self, step: int, nbytes: int, begin: float) -> None:
        self.step = step
        """The step it was taken at."""
        self.path = Path()
        """The checkpoint directory that appears when it is committed."""
        self._nbytes = nbytes
        self._file_nbytes = 0
        self._begin = begin
        self._times: dict[str, float] = {}
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._delivered = False
        self._call_seconds: float | None = None
        self._gate_seconds = 0.0
        self._figures: Callable[[], dict[str, Any]] = dict
        self._native_spans: Callable[[], list[Span]] = list
        self._spans: list[Span] = []
        self._gate: Callable[[], None] = lambda: None
        self._abandoned = False

    # --- for its users

    @property
    def captured(self) -> bool:
        """Whether the training state may change again."""
        return "captured" in self._times

    @property
    def persisted(self) -> bool:
        """Whether this process's bytes are on stable storage."""
        return "persisted" in self._times

    @property
    def committed(self) -> bool:
        """Whether ``restore()`` finds it."""
        return "committed" in self._times

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait until captured.

        Raises:
            SnapshotTimeoutError: ``timeout`` seconds passed first.
            DatastatesError: The snapshot failed before.
        """
        self._wait("captured", timeout)

    def wait_persisted(self, timeout: float | None = None) -> None:
        """Wait until persisted; raises as :meth:`wait_captured` does."""
        self._wait("persisted", timeout)

    def wait_committed(self, timeout: float | None = None) -> None:
        """Wait until committed; raises as :meth:`wait_captured` does."""
        self._wait("committed", timeout)

    def exception(self) -> BaseException | None:
        """What made the snapshot fail, None as long as nothing did. Does not wait."""
        with self._changed:
            return self._deliver()

    @property
    def report(self) -> Report:
        """What it cost so far."""
        figures, spans = self._figures(), self._all_spans()
        with self._changed:
            reached = [s for s in STATES if s in self._times]
            return Report(
                step=self.step,
                path=self.path,
                state="failed" if self._error else reached[-1] if reached else STATES[0],
                nbytes=self._nbytes,
                file_nbytes=self._file_nbytes,
                snapshot_seconds=time.monotonic() - self._begin if self._call_seconds is None else self._call_seconds,
                gate_seconds=self._gate_seconds,
                capture_seconds=self._times.get("captured"),
                persist_seconds=self._times.get("persisted"),
                commit_seconds=self._times.get("committed"),
                backend=str(figures.get("backend", "")),
                direct=bool(figures.get("direct", False)),
                stages=stages(spans),
                executor=figures,
            )

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what was done when, so far, as a trace that https://ui.perfetto.dev and Chrome show.

        One row a thread, CUDA stream and slot of the ring; times on this machine's monotonic clock.

        Raises:
            OSError: ``path`` cannot be written.
        """
        trace = chrome_trace(self._all_spans(), process=os.getpid(), name=f"datastates, snapshot {self.step}")
        Path(path).write_text(json.dumps(trace), encoding="ascii")

    def _all_spans(self) -> list[Span]:
        return [*self._spans, *self._native_spans()]

    def __repr__(self) -> str:
        """Step, state and path."""
        return f"<Snapshot step={self.step} {self.report.state} {str(self.path)!r}>"

    # --- for the engine

    def holds(self, nbytes: int) -> None:
        """Note the bytes of its arrays, where they were not known when it was promised."""
        self._nbytes = nbytes

    @property
    def ended(self) -> bool:
        """Whether it was committed or has failed."""
        return self.committed or self._error is not None or self._abandoned

    def deliver(self) -> BaseException | None:
        """Its failure, if nobody has been told yet: whoever calls this is told."""
        with self._changed:
            return None if self._delivered else self._deliver()

    @property
    def failed(self) -> bool:
        """Whether it has failed."""
        return self._error is not None

    def _deliver(self) -> BaseException | None:
        if self._error is not None:
            self._delivered = True
            _silent.discard(self)
        return self._error

    def called(self) -> None:
        """Note that the user's call returns."""
        end = time.monotonic()
        self._call_seconds = end - self._begin
        self._spans.append(Span("stall", "training thread", self._begin, end, 0))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note when a stage's work, in the engine's thread, begins and ends."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._spans.append(Span(name, "engine thread", begin, time.monotonic(), 0))

    def pass_gate(self) -> None:
        """Return once the state may change for work enqueued from now on; never raises for a failed snapshot."""
        if self.captured or self.ended:
            return
        begin = time.monotonic()
        gate = self._gate
        gate()
        while gate is not (gate := self._gate):  # it was replaced meanwhile
            gate()
        end = time.monotonic()
        self._gate_seconds += end - begin
        self._spans.append(Span("gate", "training thread", begin, end, 0))

    def reach(self, state: str, *, at: float | None = None, file_nbytes: int = 0) -> None:
        """Note that a state has been reached, now or at that time of the monotonic clock."""
        with self._changed:
            self._times[state] = (time.monotonic() if at is None else at) - self._begin
            self._file_nbytes = file_nbytes or self._file_nbytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Note what made it fail; of several errors the first is told."""
        _forget_frames(error, log=self._error is None)
        with self._changed:
            if self._error is None:
                self._error = error
                _silent.add(self)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Note, in a forked child, that only the parent can finish it."""
        self._changed = threading.Condition()
        self._abandoned = True
        self.detach({}, [])

    def attach(
        self, gate: Callable[[], None], figures: Callable[[], dict[str, Any]], spans: Callable[[], list[Span]]
    ) -> None:
        """Say how its gate is passed, and where the native core's figures and spans come from, while it lasts."""
        self._gate, self._figures, self._native_spans = gate, figures, spans

    def detach(self, figures: dict[str, Any], spans: list[Span]) -> None:
        """Keep the last figures, and let go of everything else: a snapshot that has ended holds no state."""
        self.attach(lambda: None, lambda: figures, lambda: spans)

    def wait_free(self) -> None:
        """Wait until captured or failed, without raising: the state may change then."""
        with self._changed:
            self._changed.wait_for(lambda: self.captured or self.ended)

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until committed or failed, without raising; False when ``timeout`` seconds pass first."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ended, timeout)

    def _wait(self, state: str, timeout: float | None) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: state in self._times or self._error or self._abandoned, timeout)
            if state in self._times:
                return
            error = self._deliver()
            if error is not None:
                raise error
            if self._abandoned:
                raise SnapshotAbandonedError(f"snapshot {self.step} was begun before a fork, by the parent process")
            if not done:
                raise SnapshotTimeoutError(f"snapshot {self.step} was not {state} within {timeout} s")
