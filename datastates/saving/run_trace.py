"""The trace of a whole run: its snapshots, its restores and the training steps, in bounded memory."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from datastates.executor.jobs import NOTHING, Recorded
from datastates.executor.timeline import SNAPSHOTS, Span, coarse, write_trace
from datastates.saving import gate
from datastates.saving.snapshot import Snapshot, error_of, has_ended, kept, spans_of

MOST = 65_536
"""Most spans that are kept: some 10 MB, and more than a thousand snapshots."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The work of a snapshot or a restore that has ended.

    Attributes:
        name: Its name.
        track: The track of the span that stands for all of it.
        own: Spans of work outside of the native core.
        work: Spans of work of the native core.
        count: Number of all these spans.
    """

    name: str
    track: str
    own: Sequence[Span]
    work: Recorded
    count: int

    def spans(self) -> list[Span]:
        """The spans."""
        return coarse([*self.own, *self.work.spans()], self.name, self.track)


class RunTrace:
    """The coarse spans of a run; when they are too many, the oldest are forgotten. Not thread-safe.

    They are kept in columns: only :meth:`write` makes an object of each.
    """

    def __init__(self) -> None:
        """Begin now, without spans."""
        self._begin = time.monotonic()
        self._ended: deque[Snapshot] = deque()
        self._kept: deque[_Kept] = deque()
        self._count = 0
        self._forgotten = 0

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Keep the work of a snapshot that has ended, once the engine's thread has made it coarse."""
        self._ended.append(snapshot)
        while self._ended and (work := kept(self._ended[0])) is not None:
            self._add(_name(self._ended.popleft()), SNAPSHOTS, *work)

    def add_restore(self, step: int, spans: Sequence[Span]) -> None:
        """Keep the work of a restore of ``step``."""
        name, track = f"restore {step}", "restores"
        self._add(name, track, coarse(spans, name, track)[1:], NOTHING)

    def _add(self, name: str, track: str, own: Sequence[Span], work: Recorded) -> None:
        self._kept.append(_Kept(name, track, own, work, 1 + len(own) + len(work)))
        self._count += self._kept[-1].count
        while self._count - self._kept[0].count >= MOST:
            oldest = self._kept.popleft().count
            self._count -= oldest
            self._forgotten += oldest

    def write(self, path: str | os.PathLike[str], name: str, others: Sequence[Snapshot]) -> None:
        """Write the trace; raises OSError.

        Args:
            path: The file.
            name: Name of the run. The trace says after it how many spans were forgotten, if any.
            others: Further snapshots, which may be in flight.
        """
        known = [span for one in self._kept for span in one.spans()]
        forgotten = self._forgotten + max(0, len(known) - MOST)
        in_flight = (coarse(spans_of(one), _name(one), SNAPSHOTS) for one in (*self._ended, *others))
        spans = [*known[-MOST:], *itertools.chain(*in_flight), *gate.steps(self._begin)]
        write_trace(path, spans, f"{name}, {forgotten} older spans left out" if forgotten else name)


def _name(snapshot: Snapshot) -> str:
    outcome = " failed" if error_of(snapshot) is not None else "" if has_ended(snapshot) else " in flight"
    return f"snapshot {snapshot.step}{outcome}"
