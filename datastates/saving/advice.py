"""What the spans of a run's snapshots imply for its settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from datastates.executor.timeline import Span, Stage, stages
from datastates.saving.cadence import best_interval

_SHORT = 0.001
"""Seconds for each snapshot that are not worth a setting."""
_MOST = 0.8
"""Share of the time until durable from which on the storage is what limits it."""
_STAGES = ("stall", "gate", "cache_wait", "capture", "write")
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
    """Advice from the spans of snapshots, as :meth:`~datastates.Snapshot.trace` writes them.

    Args:
        spans: The spans of one or more snapshots of one rank. Spans of other stages are left out.
        mtbf: Mean time between failures in seconds, for advice on the interval; None if it is not known.

    Raises:
        ValueError: There is no committed snapshot.
    """
    calls = sorted(span.begin for span in spans if span.stage == "stall")
    commits = sorted(span.end for span in spans if span.stage == "commit")
    if not calls or not commits:
        raise ValueError("it has no snapshot from its call to its commit")
    sums = stages([span for span in spans if span.stage in _STAGES], dict.fromkeys(_STAGES, ""))
    call, gate, room, capture, write = (sums.get(stage, _NONE) for stage in _STAGES)
    count = len(calls)
    in_call, at_gates = call.busy_seconds / count, gate.busy_seconds / count
    durable = median(end - begin for begin, end in zip(calls, commits, strict=False))
    on_gpu = any(span.stage == "capture" and span.track.startswith("copies from GPU") for span in spans)
    return [
        Advice(
            "cost",
            f"training waited {_ms(in_call + at_gates)} for each of {count} snapshot(s), {_ms(in_call)} in the call "
            f"and {_ms(at_gates)} at gates; durable after {durable:.2f} s",
        ),
        _on_interval(in_call + at_gates, durable, mtbf),
        *_on_caches(at_gates, room.busy_seconds / count, capture.nbytes // count, on_gpu=on_gpu),
        _on_storage(write, durable * count),
    ]


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
