"""The trace of a whole run: its snapshots, its restores and the training steps, in bounded memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

from datastates.executor.timeline import SNAPSHOTS, Span, coarse, write_trace
from datastates.saving import gate
from datastates.saving.course import Course

MOST = 65_536
"""Most spans that are kept: some 10 MB, and more than a thousand snapshots."""


class RunTrace:
    """The coarse spans of a run; when they are too many, the oldest are forgotten. Not thread-safe."""

    def __init__(self) -> None:
        """Begin now, without spans."""
        self._begin = time.monotonic()
        self._spans: deque[Span] = deque(maxlen=MOST)
        self._forgotten = 0

    def add_snapshot(self, course: Course) -> None:
        """Keep the work of a snapshot that has ended."""
        self._add(_spans(course))

    def add_restore(self, step: int, spans: Sequence[Span]) -> None:
        """Keep the work of a restore of ``step``."""
        self._add(coarse(spans, f"restore {step}", "restores"))

    def _add(self, spans: Sequence[Span]) -> None:
        self._forgotten += max(0, len(self._spans) + len(spans) - MOST)
        self._spans.extend(spans)

    def write(self, path: str | os.PathLike[str], name: str, others: Sequence[Course]) -> None:
        """Write the trace; raises OSError.

        Args:
            path: The file.
            name: Name of the run. The trace says after it how many spans were forgotten, if any.
            others: Further snapshots, which may be in flight.
        """
        spans = [*self._spans, *(span for course in others for span in _spans(course)), *gate.steps(self._begin)]
        write_trace(path, spans, f"{name}, {self._forgotten} older spans left out" if self._forgotten else name)


def _spans(course: Course) -> list[Span]:
    outcome = " failed" if course.error is not None else "" if course.ended else " in flight"
    return coarse(course.spans(), f"snapshot {course.step}{outcome}", SNAPSHOTS)
