""":class:`Course`: the progress of a snapshot, its error if it failed, and the waits for it."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

from datastates._base import log, workers
from datastates._base.waiting import Bell
from datastates.errors import DatastatesError, SnapshotAbandonedError, SnapshotTimeoutError
from datastates.executor.jobs import NOTHING, Recorded
from datastates.executor.timeline import FINEST, TRAINING_THREAD, Span
from datastates.storage.location import Location

_silent: set[Course] = set()
"""The courses of failed snapshots whose error has not been delivered to anybody."""


@atexit.register
def _tell_at_exit() -> None:
    workers.finish()  # ends snapshots that exit functions took, and threads that outlived the main thread
    for course in _silent:
        log.error("snapshot %d failed, and nobody asked: %s", course.step, course.error)
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


def _forget_frames(error: BaseException, *, is_first: bool) -> None:
    """Drop the frames that an error passed through, because they hold the training state.

    ``is_first``: log the error before that with its traceback, unless it is an error of this package.
    """
    if is_first and not isinstance(error, DatastatesError):
        log.error("a snapshot failed", of=error)
    seen: set[int] = set()  # errors may form a cycle: an error that was told to other ranks may cause its own context
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(error, DatastatesError):
            link.with_traceback(None)  # an error's class may forbid to set attributes
        else:
            traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class Course:
    """The progress of one snapshot through its states: captured, persisted, committed, or failed. Thread-safe.

    The engine sets it; a :class:`~datastates.Snapshot` shows it to users.

    Attributes:
        step: The training step that the snapshot was taken at.
        path: The path of the checkpoint directory: the expected one until the commit, then the actual one.
        nbytes: Bytes of the arrays; may be set later if they are not known at the start.
        file_nbytes: Bytes of the container; 0 until it is persisted.
        begin: When the user's call began, in seconds on the monotonic clock.
        times: For each state that was reached, by name, the seconds from ``begin`` until then.
        figures: Returns the native core's figures of the job that writes the file.
    """

    def __init__(self, step: int, nbytes: int, begin: float) -> None:
        self.step = step
        self.path = Location("")
        self.nbytes = nbytes
        self.file_nbytes = 0
        self.begin = begin
        self.times: dict[str, float] = {}
        self.figures: Callable[[], dict[str, Any]] = dict
        self._changed = Bell()
        self._failure: dict[str, BaseException] = {}  # setdefault() keeps the first error
        self._delivered = False
        self._spans: list[Span] = []
        self._work: Recorded | None = NOTHING
        self._native: Callable[[], Recorded] = lambda: NOTHING
        self._gate: Callable[[], None] = lambda: None
        self._abandoned = False

    # --- how far it is

    @property
    def error(self) -> BaseException | None:
        """The error that made the snapshot fail; None if it has not failed."""
        return self._failure.get("")

    @property
    def ended(self) -> bool:
        """Whether the snapshot was committed, has failed, or was abandoned in a forked child."""
        return "committed" in self.times or self.error is not None or self._abandoned

    @property
    def is_free(self) -> bool:
        """Whether the training state may change, because the snapshot is captured or has ended."""
        return "captured" in self.times or self.ended

    def deliver(self) -> BaseException | None:
        """The error that made the snapshot fail, None if it has not failed. The error then counts as delivered."""
        if (error := self.error) is not None:
            self._delivered = True
            _silent.discard(self)
        return error

    def undelivered(self) -> BaseException | None:
        """The snapshot's error if it was not delivered yet, else None. The error then counts as delivered."""
        return None if self._delivered else self.deliver()

    def spans(self) -> list[Span]:
        """The spans of all work on the snapshot so far."""
        return [*self._spans, *self._native().spans()]

    def kept(self) -> tuple[list[Span], Recorded] | None:
        """What a run's trace keeps: the spans of work outside of the native core, and those of its work, coarse.

        None until the engine's thread has made the latter, right after the snapshot's end.
        """
        return None if self._work is None else (self._spans, self._work)

    @property
    def stall_seconds(self) -> float:
        """Seconds that training has waited for the snapshot so far, in the call and at gates."""
        return sum(span.end - span.begin for span in self._spans.copy() if span.stage in ("stall", "gate"))

    # --- waiting

    def wait(self, state: str, timeout: float | None = None) -> None:
        """Wait until the snapshot has reached ``state``, as :meth:`~datastates.Snapshot.wait_captured` does."""
        done = self._changed.wait_for(lambda: state in self.times or self.error or self._abandoned, timeout)
        if state in self.times:
            return
        error = self.deliver()
        if error is not None:
            raise error
        if self._abandoned:
            raise SnapshotAbandonedError(f"snapshot {self.step} was begun before a fork, by the parent process")
        if not done:
            raise SnapshotTimeoutError(f"snapshot {self.step} was not {state} within {timeout} s")

    def wait_free(self) -> None:
        """Wait until the training state may change: the snapshot is captured or has ended. Never raises its error."""
        self._changed.wait_for(lambda: self.is_free)

    def wait_ended(self) -> None:
        """Wait until the snapshot has ended. Never raises its error."""
        self._changed.wait_for(lambda: self.ended)

    def pass_gate(self) -> None:
        """Wait until work that is enqueued afterwards may change the training state.

        Returns at once if the snapshot is captured or has ended.
        """
        if self.is_free:
            return
        begin = time.monotonic()
        gate = self._gate
        gate()
        while gate is not (gate := self._gate):  # the gate was replaced while this thread waited
            gate()
        self._spans.append(Span("gate", TRAINING_THREAD, begin, time.monotonic(), 0))

    # --- what happens to it

    def called(self) -> None:
        """Record that the user's call returns now."""
        self._spans.append(Span("stall", TRAINING_THREAD, self.begin, time.monotonic(), 0))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a ``with`` block, and record it as work of the stage ``name`` on the engine's thread."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._spans.append(Span(name, "engine thread", begin, time.monotonic(), 0))

    def reach(self, state: str, *, at: float | None = None, file_nbytes: int = 0) -> None:
        """Record that the snapshot has reached ``state``, now or at the time ``at`` of the monotonic clock."""
        self.file_nbytes = file_nbytes or self.file_nbytes
        self.times[state] = (time.monotonic() if at is None else at) - self.begin
        self._changed.ring()

    def fail(self, error: BaseException) -> None:
        """Record the error that made the snapshot fail. Of several errors, the first one is kept."""
        _forget_frames(error, is_first=self.error is None)
        if self._failure.setdefault("", error) is error:
            _silent.add(self)
        if self._delivered:  # another thread has delivered it meanwhile
            _silent.discard(self)
        self._changed.ring()

    def abandon(self) -> None:
        """Record, in a forked child, that only the parent process can finish the snapshot."""
        self._abandoned = True
        self.detach({}, NOTHING)

    def attach(
        self, gate: Callable[[], None], figures: Callable[[], dict[str, Any]], native: Callable[[], Recorded]
    ) -> None:
        """Set the functions that wait at the snapshot's gate, and that return the native core's figures and spans."""
        self._gate, self.figures, self._native = gate, figures, native
        self._work = None

    def detach(self, figures: dict[str, Any], native: Recorded) -> None:
        """Keep the last figures and spans, and drop the functions, which hold the training state."""
        self.attach(lambda: None, lambda: figures, lambda: native)
        self._work = native.coarse((time.monotonic() - self.begin) / FINEST)


def wait_ended(courses: Iterable[Course]) -> None:
    """Wait until each of some snapshots is committed or has failed."""
    for course in courses:
        course.wait_ended()
