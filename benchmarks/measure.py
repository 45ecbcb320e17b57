"""Interleaved repetitions: every system once a round, round after round, so that a drifting machine drifts for all."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Sample = dict[str, float]
"""What one repetition of one system gave, by the figure's name; times in seconds, sizes in bytes."""


@dataclass
class Result:
    """One benchmark: what was run, and every sample of it.

    Attributes:
        parameters: Sizes and other circumstances that the figures depend on.
        settings: In a line for each system, how it was set.
        samples: For each system its samples, one a round.
        errors: For each system that failed, the error; its earlier samples stay.
    """

    parameters: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def fail(self, system: str, error: Exception) -> None:
        """Record the error of a system, the first one, and print where it came from."""
        print(f"  {system} failed:", file=sys.stderr)
        traceback.print_exception(error)
        self.errors.setdefault(system, f"{type(error).__name__}: {error}"[:2000])


@dataclass(frozen=True)
class Plan:
    """How often to repeat.

    Attributes:
        repeat: Measured rounds.
        until: Moment of the monotonic clock after which no further round is begun; the first always runs.
    """

    repeat: int = 5
    until: float = float("inf")


@contextmanager
def stopwatch() -> Iterator[Sample]:
    """Fill a sample with the ``seconds`` and the process's own ``cpu_seconds``, all threads, that a block took.

    The kernel accounts io_uring's workers to the process, but not the threads that write dirty pages back later.
    """
    sample: Sample = {}
    cpu, begin = time.process_time(), time.perf_counter()
    yield sample
    sample["seconds"] = time.perf_counter() - begin
    sample["cpu_seconds"] = time.process_time() - cpu


def interleave(
    result: Result,
    actions: Mapping[str, Callable[[], Sample]],
    plan: Plan,
    *,
    rounds: Mapping[str, int] | None = None,
    warm_up: bool = True,
) -> None:
    """Run every action once unmeasured, then in rounds: A1 B1 C1 A2 B2 C2 …

    An action that raises is left out from then on, and its error recorded.

    Args:
        result: Where samples and errors go.
        actions: By system, what runs and returns one sample.
        plan: How often.
        rounds: Fewer rounds for some systems.
        warm_up: Whether the unmeasured round comes first.
    """
    left = dict(actions)

    def run(name: str) -> Sample | None:
        try:
            return left[name]()
        except Exception as error:  # whatever a system raises is a result, too
            result.fail(name, error)
            del left[name]
            return None

    if warm_up:
        for name in actions:
            run(name)
    for number in range(plan.repeat):
        if number and time.monotonic() > plan.until:
            break
        for name in list(left):
            if rounds is not None and number >= rounds.get(name, plan.repeat):
                continue
            sample = run(name)
            if sample is not None:
                result.samples.setdefault(name, []).append(sample)


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def status(field: str) -> int:
    """Bytes that the kernel says of this process in a field of ``/proc/self/status``."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) << 10
