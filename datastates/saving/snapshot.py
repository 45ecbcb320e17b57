""":class:`Snapshot`, the future that ``snapshot()`` returns, and the functions by which its makers let it go on.

Users see the names of the class. The functions are for those who make snapshots: the engine and the adapters.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TextIO, cast

from datastates._base import log, workers
from datastates._base.waiting import Bell
from datastates.errors import DatastatesError, SnapshotAbandonedError, SnapshotTimeoutError
from datastates.executor.jobs import NOTHING, Recorded
from datastates.executor.timeline import FINEST, TRAINING_THREAD, Span, stages, write_trace
from datastates.saving.report import Report
from datastates.storage.location import Face, Location

NOWHERE = Location("")
"""The path of a snapshot that is not known yet."""

_silent: set[Snapshot] = set()
"""The failed snapshots whose error has not been delivered to anybody."""


@atexit.register
def _tell_at_exit() -> None:
    workers.finish()  # ends snapshots that exit functions took, and threads that outlived the main thread
    for snapshot in _silent:
        log.error("snapshot %d failed, and nobody asked: %s", snapshot.step, error_of(snapshot))
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


class Snapshot:
    """A checkpoint that is being made. It is captured, then persisted, then committed. Thread-safe.

    - *captured*: the training state may change again;
    - *persisted*: this process's bytes are on stable storage;
    - *committed*: the checkpoint is complete, and ``restore()`` finds it.

    A snapshot that fails reaches no further state. The wait methods raise its error, which is then delivered. An error
    that is not delivered so is handled by the :class:`~datastates.Checkpointer` as its setting ``on_error`` says. An
    error that is still not delivered when the process ends is logged, and the process ends with status 120.
    """

    def __init__(self, step: int, nbytes: int, begin: float, path: Location = NOWHERE) -> None:
        """Begin a snapshot.

        Args:
            step: The training step that it is taken at.
            nbytes: Bytes of the arrays, as far as they are known.
            begin: When the user's call began, in seconds on the monotonic clock.
            path: The path that the checkpoint is expected to have, as far as it is known.
        """
        self._step = step
        self._nbytes = nbytes
        self._begin = begin
        self._path = path
        self._file_nbytes = 0
        self._times: dict[str, float] = {}  # for each state that was reached, the seconds from the call until then
        self._failure: dict[str, BaseException] = {}  # setdefault() keeps the first error
        self._delivered = self._abandoned = False
        self._changed = Bell()
        self._spans: list[Span] = []
        self._work: Recorded | None = NOTHING
        self._gate: Callable[[], object] = lambda: None
        self._places: Callable[[Location], Sequence[Face]] = lambda path: [path.parent.face]
        self._figures: Callable[[], dict[str, Any]] = dict
        self._native: Callable[[], Recorded] = lambda: NOTHING

    @property
    def step(self) -> int:
        """The training step that the snapshot was taken at."""
        return self._step

    @property
    def path(self) -> Face:
        """The path of the checkpoint directory: the expected one until the commit, then the actual one.

        The address, as a string, of one in a store.
        """
        return self._path.face

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
        """Whether the checkpoint is complete. ``restore()`` then finds it."""
        return "committed" in self._times

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait until the training state may change again.

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
        """Wait until this process's bytes are on stable storage; otherwise as :meth:`wait_captured`."""
        self._wait("persisted", timeout)

    def wait_committed(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete; otherwise as :meth:`wait_captured`."""
        self._wait("committed", timeout)

    def exception(self) -> BaseException | None:
        """The error that made the snapshot fail, None if it has not failed. Does not wait.

        The error then counts as delivered: :class:`~datastates.Checkpointer` no longer raises it.
        """
        if (error := error_of(self)) is not None:
            self._delivered = True
            _silent.discard(self)
        return error

    @property
    def report(self) -> Report:
        """The sizes, times and rates of the snapshot so far, on this rank."""
        figures, spans, times = self._figures(), spans_of(self), self._times.copy()
        waits = {name: [s.end - s.begin for s in spans if s.stage == name] for name in ("stall", "gate")}
        return Report(
            step=self._step,
            path=self.path,
            places=tuple(self._places(self._path)) if self.committed else (),
            state="failed" if error_of(self) else next(reversed(times), "started"),
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

        The trace has a row for each thread, each GPU that is copied from, and each write slot. Times are read from this
        machine's monotonic clock.

        Args:
            path: The file to write. An existing file is replaced.

        Raises:
            OSError: ``path`` cannot be written.
        """
        write_trace(path, spans_of(self), f"datastates, snapshot {self.step}")

    def __repr__(self) -> str:
        """The snapshot's step, state and path."""
        return f"<Snapshot step={self.step} {self.report.state} {str(self.path)!r}>"

    def _wait(self, state: str, timeout: float | None) -> None:
        done = self._changed.wait_for(lambda: state in self._times or error_of(self) or self._abandoned, timeout)
        if state in self._times:
            return
        if (error := self.exception()) is not None:
            raise error
        if self._abandoned:
            raise SnapshotAbandonedError(f"snapshot {self._step} was begun before a fork, by the parent process")
        if not done:
            raise SnapshotTimeoutError(f"snapshot {self._step} was not {state} within {timeout} s")


class Cost(NamedTuple):
    """What a snapshot has cost so far.

    Attributes:
        begin: When the call began, in seconds on the monotonic clock.
        nbytes: Bytes of the arrays.
        stall_seconds: Seconds that training has waited, in the call and at gates.
        durable_seconds: Seconds from the call until it was committed; None before that.
    """

    begin: float
    nbytes: int
    stall_seconds: float
    durable_seconds: float | None


def cost_of(snapshot: Snapshot) -> Cost:
    """What a snapshot has cost so far."""
    stall = sum(span.end - span.begin for span in snapshot._spans.copy() if span.stage in ("stall", "gate"))
    return Cost(snapshot._begin, snapshot._nbytes, stall, snapshot._times.get("committed"))


def follow(snapshot: Snapshot, places: Callable[[Location], Sequence[Face]]) -> None:
    """Let the report of a snapshot tell the places that have the checkpoint of a path."""
    snapshot._places = places


def error_of(snapshot: Snapshot) -> BaseException | None:
    """The error that made a snapshot fail; None if it has not failed. It does not count as delivered."""
    return snapshot._failure.get("")


def has_ended(snapshot: Snapshot) -> bool:
    """Whether a snapshot was committed, has failed, or was abandoned in a forked child."""
    return "committed" in snapshot._times or "" in snapshot._failure or snapshot._abandoned


def is_free(snapshot: Snapshot) -> bool:
    """Whether the training state may change, because a snapshot is captured or has ended."""
    return "captured" in snapshot._times or has_ended(snapshot)


def undelivered(snapshot: Snapshot) -> BaseException | None:
    """A snapshot's error if it was not delivered yet, else None. The error then counts as delivered."""
    return None if snapshot._delivered else snapshot.exception()


def spans_of(snapshot: Snapshot) -> list[Span]:
    """The spans of all work on a snapshot so far."""
    return [*snapshot._spans, *snapshot._native().spans()]


def kept(snapshot: Snapshot) -> tuple[list[Span], Recorded] | None:
    """What a run's trace keeps: the spans of work outside of the native core, and those of its work, coarse.

    None until the engine's thread has made the latter, right after the snapshot's end.
    """
    return None if snapshot._work is None else (snapshot._spans, snapshot._work)


# --- waits for it, which never raise its error


def wait_free(snapshot: Snapshot) -> None:
    """Wait until the training state may change: the snapshot is captured or has ended."""
    snapshot._changed.wait_for(lambda: is_free(snapshot))


def wait_ended(snapshots: Iterable[Snapshot]) -> None:
    """Wait until each of some snapshots has ended."""
    for snapshot in snapshots:
        snapshot._changed.wait_for(partial(has_ended, snapshot))


def pass_gate(snapshot: Snapshot) -> None:
    """Wait until work that is enqueued afterwards may change the training state.

    Returns at once if the snapshot is captured or has ended.
    """
    if is_free(snapshot):
        return
    begin = time.monotonic()
    gate = snapshot._gate
    gate()
    while gate is not (gate := snapshot._gate):  # the gate was replaced while this thread waited
        gate()
    snapshot._spans.append(Span("gate", TRAINING_THREAD, begin, time.monotonic(), 0))


# --- what happens to it


def begun_later(
    step: int, nbytes: int, begin: float, path: Location | None, wait_begun: Callable[[], object]
) -> Snapshot:
    """A snapshot whose call returns before its file is begun: until then, ``wait_begun`` waits at its gate."""
    snapshot = Snapshot(step, nbytes, begin, path or NOWHERE)
    attach(snapshot, wait_begun, dict, lambda: NOTHING)
    called(snapshot)
    return snapshot


def called(snapshot: Snapshot) -> None:
    """Record that the user's call returns now."""
    snapshot._spans.append(Span("stall", TRAINING_THREAD, snapshot._begin, time.monotonic(), 0))


def describe(snapshot: Snapshot, *, nbytes: int) -> None:
    """Set the bytes of the arrays, where they were not known as the snapshot was made."""
    snapshot._nbytes = nbytes


@contextlib.contextmanager
def stage(snapshot: Snapshot, name: str) -> Iterator[None]:
    """Time a ``with`` block, and record it as work of the stage ``name`` on the engine's thread."""
    begin = time.monotonic()
    try:
        yield
    finally:
        snapshot._spans.append(Span(name, "engine thread", begin, time.monotonic(), 0))


def reach(
    snapshot: Snapshot, state: str, *, at: float | None = None, file_nbytes: int = 0, path: Location | None = None
) -> None:
    """Record that a snapshot has reached a state.

    Args:
        snapshot: The snapshot.
        state: ``captured``, ``persisted`` or ``committed``.
        at: When, on the monotonic clock; by default now.
        file_nbytes: Bytes of the container, if they are known now.
        path: The path of the checkpoint, if it is known now.
    """
    snapshot._path = path or snapshot._path
    snapshot._file_nbytes = file_nbytes or snapshot._file_nbytes
    snapshot._times[state] = (time.monotonic() if at is None else at) - snapshot._begin
    snapshot._changed.ring()


def fail(snapshot: Snapshot, error: BaseException) -> None:
    """Record the error that made a snapshot fail. Of several errors, the first one is kept."""
    _forget_frames(error, is_first=error_of(snapshot) is None)
    if snapshot._failure.setdefault("", error) is error:
        _silent.add(snapshot)
    if snapshot._delivered:  # another thread has delivered it meanwhile
        _silent.discard(snapshot)
    snapshot._changed.ring()


def abandon(snapshot: Snapshot) -> None:
    """Record, in a forked child, that only the parent process can finish a snapshot."""
    snapshot._abandoned = True
    detach(snapshot, {}, NOTHING)


def attach(
    snapshot: Snapshot,
    gate: Callable[[], object],
    figures: Callable[[], dict[str, Any]],
    native: Callable[[], Recorded],
) -> None:
    """Set the functions that wait at a snapshot's gate, and that return the native core's figures and spans."""
    snapshot._gate, snapshot._figures, snapshot._native = gate, figures, native
    snapshot._work = None


def detach(snapshot: Snapshot, figures: dict[str, Any], native: Recorded) -> None:
    """Keep the last figures and spans, and drop the functions, which hold the training state."""
    attach(snapshot, lambda: None, lambda: figures, lambda: native)
    snapshot._work = native.coarse((time.monotonic() - snapshot._begin) / FINEST)
