""":class:`Snapshot`, the future that ``snapshot()`` returns."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from datastates._base import workers
from datastates._base.waiting import Bell
from datastates.errors import DatastatesError, SnapshotAbandonedError, SnapshotTimeoutError
from datastates.executor.timeline import TRAINING_THREAD, Span, stages, write_trace
from datastates.saving.report import Report

_log = logging.getLogger("datastates")

_silent: set[Snapshot] = set()
"""Failed snapshots whose error has not been delivered to anybody."""


@atexit.register
def _tell_at_exit() -> None:
    workers.finish()  # what exit functions have taken, and threads that outlived the main thread
    for snapshot in _silent:
        _log.error("snapshot %d failed, and nobody asked: %s", snapshot.step, snapshot._error)
    if _silent and sys.stderr is not None:
        sys.stderr = cast("TextIO", _FailedStream(sys.stderr))


class _FailedStream:
    """Wraps standard error, and raises in the last flush, which the interpreter itself does at exit.

    The process then ends with status 120. All exit functions still run, which ``os._exit`` would prevent.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys._getframe().f_back is None:  # only the interpreter calls it without a Python frame
            raise OSError("a snapshot failed, and nobody asked")


def _forget_frames(error: BaseException, *, log: bool) -> None:
    """Drop the frames that an error passed through, because they hold the training state.

    ``log``: first log the error with its traceback, unless it is an error of this package.
    """
    if log and not isinstance(error, DatastatesError):
        _log.error("a snapshot failed", exc_info=error)
    seen: set[int] = set()  # errors may form a cycle: one that was told to other ranks may cause its own context
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(error, DatastatesError):
            link.__traceback__ = None
        else:
            traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class Snapshot:
    """A checkpoint that is being made. It is captured, then persisted, then committed. Thread-safe.

    - *captured*: the training state may change again;
    - *persisted*: this process's bytes are on stable storage;
    - *committed*: the checkpoint is complete, and ``restore()`` finds it.

    A snapshot that fails reaches no further state. The wait methods raise its error. If it was not delivered that way,
    the :class:`~datastates.Checkpointer` handles it as its setting ``on_error`` says. An error that is still not
    delivered when the process ends is logged, and the process ends with status 120.

    Attributes:
        step: The step that it was taken at.
        path: The path of the checkpoint directory: the expected one until the commit, then the actual one.
    """

    def __init__(self, step: int, nbytes: int, begin: float) -> None:
        self.step = step
        self.path = Path()
        self._nbytes = nbytes
        self._file_nbytes = 0
        self._begin = begin
        self._times: dict[str, float] = {}
        self._changed = Bell()
        self._failure: dict[str, BaseException] = {}  # of which setdefault() lets the first one win
        self._delivered = False
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
        """Whether the checkpoint is complete, so that ``restore()`` finds it."""
        return "committed" in self._times

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait until captured.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Raises:
            SnapshotTimeoutError: ``timeout`` seconds passed first. The snapshot continues.
            SnapshotAbandonedError: This process was forked from the one that took the snapshot.
            DatastatesError: The snapshot failed before it was captured. Other errors, for example of a provider's
                ``serialize()``, are raised as they are. The error then counts as delivered.
        """
        self._wait("captured", timeout)

    def wait_persisted(self, timeout: float | None = None) -> None:
        """Wait until persisted; arguments and errors are those of :meth:`wait_captured`."""
        self._wait("persisted", timeout)

    def wait_committed(self, timeout: float | None = None) -> None:
        """Wait until committed; arguments and errors are those of :meth:`wait_captured`."""
        self._wait("committed", timeout)

    def exception(self) -> BaseException | None:
        """The error that made the snapshot fail, None if it has not failed. Does not wait.

        The error then counts as delivered: :class:`~datastates.Checkpointer` no longer raises it.
        """
        return self._deliver()

    @property
    def report(self) -> Report:
        """Its sizes, times and rates so far."""
        figures, spans = self._figures(), self._all_spans()
        waits = {name: [s.end - s.begin for s in spans if s.stage == name] for name in ("stall", "gate")}
        times = self._times.copy()
        return Report(
            step=self.step,
            path=self.path,
            state="failed" if self._error else next(reversed(times), "started"),
            nbytes=self._nbytes,
            file_nbytes=self._file_nbytes,
            snapshot_seconds=sum(waits["stall"]) if waits["stall"] else time.monotonic() - self._begin,
            gate_seconds=sum(waits["gate"]),
            capture_seconds=times.get("captured"),
            persist_seconds=times.get("persisted"),
            commit_seconds=times.get("committed"),
            backend=str(figures.get("backend", "")),
            direct=bool(figures.get("direct", False)),
            stages=stages(spans),
            executor=figures,
        )

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of the work so far, in the format that https://ui.perfetto.dev and Chrome show.

        It has a row for each thread, each GPU that is copied from, and each write slot. Times are those of this
        machine's monotonic clock.

        Args:
            path: The file to write. An existing file is replaced.

        Raises:
            OSError: ``path`` cannot be written.
        """
        write_trace(path, self._all_spans(), f"datastates, snapshot {self.step}")

    def _all_spans(self) -> list[Span]:
        return [*self._spans, *self._native_spans()]

    def __repr__(self) -> str:
        """Step, state and path."""
        return f"<Snapshot step={self.step} {self.report.state} {str(self.path)!r}>"

    # --- for the engine

    def holds(self, nbytes: int) -> None:
        """Set the bytes of its arrays, if they were not known when the snapshot was made."""
        self._nbytes = nbytes

    @property
    def ended(self) -> bool:
        """Whether it was committed, has failed, or was abandoned by a fork."""
        return self.committed or self._error is not None or self._abandoned

    def deliver(self) -> BaseException | None:
        """Its error if it was not delivered yet, else None. The error then counts as delivered."""
        return None if self._delivered else self._deliver()

    @property
    def failed(self) -> bool:
        """Whether it has failed."""
        return self._error is not None

    @property
    def _error(self) -> BaseException | None:
        return self._failure.get("")

    def _deliver(self) -> BaseException | None:
        if (error := self._error) is not None:
            self._delivered = True
            _silent.discard(self)
        return error

    def called(self) -> None:
        """Record that the user's call returns now."""
        self._spans.append(Span("stall", TRAINING_THREAD, self._begin, time.monotonic(), 0))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record when the work of a stage, on the engine's thread, begins and ends."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._spans.append(Span(name, "engine thread", begin, time.monotonic(), 0))

    def pass_gate(self) -> None:
        """Wait until the state may change by work that is enqueued from then on. Returns at once if it has ended."""
        if self.captured or self.ended:
            return
        begin = time.monotonic()
        gate = self._gate
        gate()
        while gate is not (gate := self._gate):  # it has been replaced in the meantime
            gate()
        self._spans.append(Span("gate", TRAINING_THREAD, begin, time.monotonic(), 0))

    def reach(self, state: str, *, at: float | None = None, file_nbytes: int = 0) -> None:
        """Record that a state has been reached, now or at the time ``at`` of the monotonic clock."""
        self._file_nbytes = file_nbytes or self._file_nbytes
        self._times[state] = (time.monotonic() if at is None else at) - self._begin
        self._changed.ring()

    def fail(self, error: BaseException) -> None:
        """Record the error that made it fail. Of several errors, the first one is kept."""
        _forget_frames(error, log=self._error is None)
        if self._failure.setdefault("", error) is error:
            _silent.add(self)
        if self._delivered:  # meanwhile
            _silent.discard(self)
        self._changed.ring()

    def abandon(self) -> None:
        """Record, in a forked child, that only the parent can finish it."""
        self._abandoned = True
        self.detach({}, [])

    def attach(
        self, gate: Callable[[], None], figures: Callable[[], dict[str, Any]], spans: Callable[[], list[Span]]
    ) -> None:
        """Set how to wait at its gate, and where to get the native core's figures and spans."""
        self._gate, self._figures, self._native_spans = gate, figures, spans

    def detach(self, figures: dict[str, Any], spans: list[Span]) -> None:
        """Keep the last figures and spans, and drop the rest: a snapshot that has ended must not hold the state."""
        self.attach(lambda: None, lambda: figures, lambda: spans)

    def wait_free(self) -> None:
        """Wait until the state may change, because the snapshot is captured or has ended. Never raises its error."""
        self._changed.wait_for(lambda: self.captured or self.ended)

    def wait_ended(self) -> None:
        """Wait until it has ended, without raising its error."""
        self._changed.wait_for(lambda: self.ended)

    def _wait(self, state: str, timeout: float | None) -> None:
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
