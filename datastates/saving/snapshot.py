""":class:`Snapshot`, the future that ``snapshot()`` returns."""

from __future__ import annotations

import os
import time
from pathlib import Path

from datastates.executor.timeline import stages, write_trace
from datastates.saving.course import Course
from datastates.saving.report import Report


class Snapshot:
    """A checkpoint that is being made. It is captured, then persisted, then committed. Thread-safe.

    - *captured*: the training state may change again;
    - *persisted*: this process's bytes are on stable storage;
    - *committed*: the checkpoint is complete, and ``restore()`` finds it.

    A snapshot that fails reaches no further state. The wait methods raise its error, which is then delivered. An error
    that is not delivered so is handled by the :class:`~datastates.Checkpointer` as its setting ``on_error`` says. An
    error that is still not delivered when the process ends is logged, and the process ends with status 120.
    """

    def __init__(self, course: Course) -> None:
        self._course = course

    @property
    def step(self) -> int:
        """The training step that the snapshot was taken at."""
        return self._course.step

    @property
    def path(self) -> Path:
        """The path of the checkpoint directory: the expected one until the commit, then the actual one."""
        return Path(self._course.path)

    @property
    def captured(self) -> bool:
        """Whether the training state may change again."""
        return "captured" in self._course.times

    @property
    def persisted(self) -> bool:
        """Whether this process's bytes are on stable storage."""
        return "persisted" in self._course.times

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is complete. ``restore()`` then finds it."""
        return "committed" in self._course.times

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
        self._course.wait("captured", timeout)

    def wait_persisted(self, timeout: float | None = None) -> None:
        """Wait until this process's bytes are on stable storage; otherwise as :meth:`wait_captured`."""
        self._course.wait("persisted", timeout)

    def wait_committed(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete; otherwise as :meth:`wait_captured`."""
        self._course.wait("committed", timeout)

    def exception(self) -> BaseException | None:
        """The error that made the snapshot fail, None if it has not failed. Does not wait.

        The error then counts as delivered: :class:`~datastates.Checkpointer` no longer raises it.
        """
        return self._course.deliver()

    @property
    def report(self) -> Report:
        """The sizes, times and rates of the snapshot so far, on this rank."""
        course = self._course
        figures, spans, times = course.figures(), course.spans(), course.times.copy()
        waits = {name: [s.end - s.begin for s in spans if s.stage == name] for name in ("stall", "gate")}
        return Report(
            step=course.step,
            path=self.path,
            state="failed" if course.error else next(reversed(times), "started"),
            nbytes=course.nbytes,
            file_nbytes=course.file_nbytes,
            snapshot_seconds=sum(waits["stall"]) if waits["stall"] else time.monotonic() - course.begin,
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
        write_trace(path, self._course.spans(), f"datastates, snapshot {self.step}")

    def __repr__(self) -> str:
        """The snapshot's step, state and path."""
        return f"<Snapshot step={self.step} {self.report.state} {str(self.path)!r}>"


def course_of(snapshot: Snapshot) -> Course:
    """The course of a snapshot, for the engine and the adapters."""
    return snapshot._course
