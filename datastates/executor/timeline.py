"""The timeline of a snapshot or a restore: spans of its stages, their sums, and a trace for Perfetto and Chrome."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

WAITS_FOR = {
    "stall": "",
    "submit": "",
    "create": "",
    "gate": "capture",
    "serialize": "",
    "cache_wait": "write",
    "capture": "cache_wait",
    "checksum": "capture",
    "encode": "checksum",
    "write": "checksum",
    "tail": "write",
    "sync": "tail",
    "commit": "sync",
}
"""The stages of a snapshot in order, each with the stage that it waits for when it is not busy."""
RESTORE_WAITS_FOR = {
    "open": "",
    "compare": "",
    "read": "verify",
    "verify": "read",
    "copy": "verify",
    "wait": "",
    "digest": "",
    "objects": "",
}
"""The stages of a restore in order, as in :data:`WAITS_FOR`.

In the stage ``wait``, the thread that called ``restore()`` waits for the reads of all ranks.
"""
TRAINING_THREAD = "training thread"
"""Name of the track of the thread that calls ``snapshot()`` or ``restore()``."""
GPU_COPIES = "copies from GPU"
"""Begin of the names of the tracks of a GPU's copies; its number follows."""
STEP = "step"
"""Name of the spans from one optimizer step to the next, in the trace of a run."""
SNAPSHOTS = "snapshots"
"""Name of the track of whole snapshots, in the trace of a run."""


class Span(NamedTuple):
    """One piece of work of a snapshot or a restore, done by one thread, CUDA stream or slot of a ring.

    Attributes:
        stage: Name of the stage: a key of :data:`WAITS_FOR` or :data:`RESTORE_WAITS_FOR`. In the trace of a run also
            :data:`STEP`, or the name of a whole snapshot or restore.
        track: Name of the thread, CUDA stream or slot of a ring that did the work.
        begin, end: Seconds on the monotonic clock.
        nbytes: Number of bytes processed; 0 where that does not apply.
        idle: Seconds between ``begin`` and ``end`` without work; 0 except in the trace of a run.
    """

    stage: str
    track: str
    begin: float
    end: float
    nbytes: int
    idle: float = 0.0


@contextlib.contextmanager
def recorded(spans: list[Span], stage: str) -> Iterator[None]:
    """Time a ``with`` block, and append a span of the training thread without bytes."""
    begin = time.monotonic()
    try:
        yield
    finally:
        spans.append(Span(stage, TRAINING_THREAD, begin, time.monotonic(), 0))


@dataclass(frozen=True, slots=True)
class Stage:
    """The sum of one stage's spans.

    Attributes:
        seconds: Seconds from the begin of the first span to the end of the last one.
        busy_seconds: The seconds of these in which at least one span was running.
        nbytes: Bytes of all spans.
        waits_for: Name of the stage that this one waits for when it is not busy; empty if it waits for none.
    """

    seconds: float
    busy_seconds: float
    nbytes: int
    waits_for: str

    @property
    def waited_seconds(self) -> float:
        """Seconds between the first begin and the last end in which no span was running."""
        return self.seconds - self.busy_seconds

    @property
    def gbps(self) -> float | None:
        """Rate in 10⁹ bytes per busy second; None for a stage without bytes or without busy time."""
        return self.nbytes / self.busy_seconds / 1e9 if self.nbytes and self.busy_seconds else None


def stages(spans: Sequence[Span], waits_for: Mapping[str, str] = WAITS_FOR) -> dict[str, Stage]:
    """Sum up the spans of each stage; the result has the stages that have spans, in the order of ``waits_for``."""
    by_stage: dict[str, list[Span]] = {name: [] for name in waits_for}
    for span in spans:
        by_stage[span.stage].append(span)
    return {name: _sum(found, waits_for[name]) for name, found in by_stage.items() if found}


def _sum(spans: list[Span], waits_for: str) -> Stage:
    busy, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.begin):
        busy += max(0.0, span.end - max(span.begin, reached) - span.idle)
        reached = max(reached, span.end)
    return Stage(reached - min(s.begin for s in spans), busy, sum(s.nbytes for s in spans), waits_for)


FINEST = 100
"""Gaps shorter than this part of a snapshot or a restore are closed by :func:`coarse`."""


def coarse(spans: Sequence[Span], name: str, track: str) -> list[Span]:
    """Sum up the spans of one snapshot or restore in a few.

    The spans of a stage are on one track, which has the stage's name, and those with short gaps between them become
    one. A GPU's copies keep their track. The spans of the training thread stay as they are.

    Args:
        spans: All spans of the snapshot or the restore.
        name: Name of one more span, from the first begin to the last end.
        track: Track of that span.
    """
    if not spans:
        return []
    begin, end = min(s.begin for s in spans), max(s.end for s in spans)
    found = [Span(name, track, begin, end, 0), *(s for s in spans if s.track == TRAINING_THREAD)]
    last: dict[str, Span] = {}
    for span in sorted(spans, key=lambda s: s.begin):
        if span.track == TRAINING_THREAD:
            continue
        row = span.track if span.track.startswith(GPU_COPIES) else span.stage
        before = last.get(row)
        if before is not None and (gap := span.begin - before.end) < (end - begin) / FINEST:
            idle = before.idle + span.idle + max(0.0, gap)
            last[row] = before._replace(end=max(before.end, span.end), nbytes=before.nbytes + span.nbytes, idle=idle)
            continue
        if before is not None:
            found.append(before)
        last[row] = span._replace(track=row)
    return [*found, *last.values()]


def write_trace(path: str | os.PathLike[str], spans: Sequence[Span], name: str) -> None:
    """Write the spans of this process into a file, as :func:`chrome_trace` gives them; raises OSError."""
    Path(path).write_text(json.dumps(chrome_trace(spans, process=os.getpid(), name=name)), encoding="ascii")


def read_trace(path: str | os.PathLike[str]) -> list[Span]:
    """The spans in a file of :func:`write_trace`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file.
    """
    try:
        events = json.loads(Path(path).read_bytes())["traceEvents"]
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = [e for e in events if e["ph"] == "X"]
        begins = [e["ts"] / 1e6 for e in spans]
        return [
            Span(
                e["name"],
                tracks[e["pid"], e["tid"]],
                begin,
                begin + e["dur"] / 1e6,
                e["args"].get("bytes", 0),
                e["args"].get("idle_seconds", 0.0),
            )
            for e, begin in zip(spans, begins, strict=True)
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks {error}") from error


def chrome_trace(spans: Sequence[Span], *, process: int, name: str) -> dict[str, Any]:
    """The spans in the Trace Event Format of the Chrome project, one row for each track.

    Spans that overlap in part are in further rows of their track. Rows are ordered by their first span. Times are in
    microseconds.

    Args:
        spans: Spans of work of one process.
        process: Number of the process, under which the viewer shows the rows.
        name: Name of the process.
    """
    ordered = _nested(spans)
    rows = {track: row for row, track in enumerate(dict.fromkeys(s.track for s in ordered))}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}]
    for track, row in rows.items():
        about = {"ph": "M", "pid": process, "tid": row}
        events.append({**about, "name": "thread_name", "args": {"name": track}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": row}})
    events += [
        {
            "ph": "X",
            "name": s.stage,
            "cat": "datastates",
            "pid": process,
            "tid": rows[s.track],
            "ts": s.begin * 1e6,
            "dur": (s.end - s.begin) * 1e6,
            "args": {"bytes": s.nbytes, "idle_seconds": s.idle},
        }
        for s in ordered
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _nested(spans: Sequence[Span]) -> list[Span]:
    """Sort spans by begin. A span that begins within another of its track and ends after it moves to ``TRACK (2)``."""
    ends: dict[str, list[float]] = {}  # of the spans of a track that are not over
    placed = []
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        track, number = span.track, 1
        while True:
            over = ends.setdefault(track, [])
            while over and over[-1] <= span.begin:
                over.pop()
            if not over or span.end <= over[-1]:
                break
            number += 1
            track = f"{span.track} ({number})"
        over.append(span.end)
        placed.append(span if number == 1 else span._replace(track=track))
    return placed
