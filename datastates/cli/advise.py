"""The command ``datastates advise``: says what the trace of a snapshot or of a run implies for the settings."""

from __future__ import annotations

import argparse
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from datastates.cli.arguments import as_seconds
from datastates.cli.output import WrongCallError, print_json, say
from datastates.executor.timeline import GPU_COPIES, SNAPSHOTS, Span, Stage, read_trace, stages
from datastates.schedule.due import best_interval

WHAT = "say what a trace implies: how often to save, how large a cache, and whether storage is the limit"


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        found = advice(read_trace(arguments.trace), arguments.mtbf)
    except ValueError as error:
        raise WrongCallError(f"{arguments.trace} is no trace of snapshots: {error}") from error
    if arguments.json:
        print_json({"ok": True, "advice": [one._asdict() for one in found]})
    else:
        for one in found:
            say(f"{one.about}: {one.text}")
    return 0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    command.add_argument(
        "trace", metavar="TRACE", help="a file that Snapshot.trace() or Checkpointer.trace() has written"
    )
    command.add_argument(
        "--mtbf", type=as_seconds, metavar="TIME", help="mean time between failures of the job, such as 6h"
    )


_SHORT = 0.001
"""Seconds for each snapshot that are not worth a setting."""
_MOST = 0.8
"""Share of the time until durable from which on the storage is what limits it."""
_STAGES = ("stall", "gate", "cache_wait", "capture", "write")
_WHOLE = "snapshot"
_NONE = Stage(0.0, 0.0, 0, "")


class Advice(NamedTuple):
    """One piece of advice.

    Attributes:
        about: The setting, or ``cost`` or ``storage``.
        text: What was measured, and what to do.
    """

    about: str
    text: str


def advice(spans: Sequence[Span], mtbf: float | None) -> list[Advice]:
    """Advice from a trace of one rank.

    Args:
        spans: The spans of one snapshot, as :meth:`~datastates.Snapshot.trace` writes them, or of a run, as
            :meth:`~datastates.Checkpointer.trace` does. Of a run, only work counts that began while a snapshot was in
            flight that is committed by now.
        mtbf: Mean time between failures in seconds, for advice on the interval; None if it is not known.

    Raises:
        ValueError: There is no committed snapshot.
    """
    committed = _committed(spans)
    if not committed:
        raise ValueError("it has no snapshot from its call to its commit")
    work = [span for span in _begun_during(committed, spans) if span.stage in _STAGES]
    sums = stages([*committed, *work], dict.fromkeys((*_STAGES, _WHOLE), ""))
    call, gate, room, capture, write = (sums.get(stage, _NONE) for stage in _STAGES)
    count = len(committed)
    in_call, at_gates = call.busy_seconds / count, gate.busy_seconds / count
    durable = median(one.end - one.begin for one in committed)
    on_gpu = any(span.track.startswith(GPU_COPIES) for span in work)
    return [
        Advice(
            "cost",
            f"training waited {_ms(in_call + at_gates)} for each of {count} snapshot(s), {_ms(in_call)} in the call "
            f"and {_ms(at_gates)} at gates; durable after {durable:.2f} s",
        ),
        _on_interval(in_call + at_gates, durable, mtbf),
        *_on_caches(at_gates, room.busy_seconds / count, capture.nbytes // count, on_gpu=on_gpu),
        _on_storage(write, sums[_WHOLE].busy_seconds),
    ]


def _committed(spans: Sequence[Span]) -> list[Span]:
    """A span from the call to the commit for each committed snapshot, by their begins."""
    whole = [span for span in spans if span.track.startswith(SNAPSHOTS)]
    if not whole:
        calls, commits = ([span for span in spans if span.stage == stage] for stage in ("stall", "commit"))
        return [Span(_WHOLE, SNAPSHOTS, calls[0].begin, commits[0].end, 0)] if calls and commits else []
    ended = [span._replace(stage=_WHOLE) for span in whole if re.fullmatch(r"snapshot \d+", span.stage)]
    return sorted(ended, key=lambda span: span.begin)


def _begun_during(committed: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    begins = [one.begin for one in committed]
    ends = [0.0, *accumulate((one.end for one in committed), max)]  # latest end of those begun before each
    return [span for span in spans if span.begin <= ends[bisect_right(begins, span.begin)]]


def _on_interval(cost: float, durable: float, mtbf: float | None) -> Advice:
    if mtbf is None:
        return Advice("every", "give --mtbf, the mean time between failures of the job, to hear how often to save")
    interval = best_interval(cost, mtbf, durable)
    return Advice(
        "every",
        f'save each {interval:.3g} s, as every="auto" does: a failure then loses {interval / 2 + durable:.3g} s of '
        f"work, and snapshots take {100 * cost / interval:.2g} % of the time",
    )


def _on_caches(gate: float, cache: float, nbytes: int, *, on_gpu: bool) -> list[Advice]:
    size = f"{max(1, round(nbytes / 1e6))}MB"
    if gate < _SHORT:
        return [Advice("host_cache", "leave it: no step waited for the capture")]
    found = [
        Advice("host_cache", f"{size} hold the whole state: its capture waited {_ms(cache)} for room in the cache")
        if cache > gate / 2
        else Advice("host_cache", f"leave it: the capture waited {_ms(cache)} for room in the cache")
    ]
    if on_gpu:
        text = f"up to {size} of free GPU memory shorten the {_ms(gate)} that steps waited at gates"
        found.append(Advice("device_cache", text))
    return found


def _on_storage(write: Stage, durable: float) -> Advice:
    share = write.busy_seconds / durable
    told = f"it wrote {write.gbps or 0.0:.2f} GB/s, and was busy for {100 * share:.0f} % of the time until durable"
    faster = "only faster storage, or a longer queue_depth or block where it is a network's, shortens that"
    return Advice("storage", f"{told}: {faster if share > _MOST else 'it is not the limit'}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
