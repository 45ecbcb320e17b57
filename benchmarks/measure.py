"""Interleaved repetitions: each round runs every system once, so that a drift of the machine affects all alike."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Sample = dict[str, float]
"""The figures of one repetition of one system, by name; times in seconds, sizes in bytes."""


@dataclass
class Result:
    """One benchmark: what was run, and every sample of it.

    Attributes:
        parameters: Sizes and other circumstances that the figures depend on.
        settings: For each system, its settings in one line.
        samples: For each system, its samples, one per round.
        errors: For each system that failed, the first error. Its earlier samples stay.
    """

    parameters: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def fail(self, system: str, error: Exception) -> None:
        """Print an error of a system with its traceback, and record it if it is the system's first."""
        print(f"  {system} failed:", file=sys.stderr)
        traceback.print_exception(error)
        self.errors.setdefault(system, f"{type(error).__name__}: {error}"[:2000])


@dataclass(frozen=True)
class Plan:
    """How often to repeat.

    Attributes:
        repeat: Number of measured rounds.
        until: Moment of the monotonic clock after which no further round begins. The first round always runs.
    """

    repeat: int = 5
    until: float = float("inf")


@contextmanager
def stopwatch() -> Iterator[Sample]:
    """Fill a sample with the ``seconds`` that a block took, and with the ``cpu_seconds`` of all threads of the process.

    The kernel counts io_uring's workers towards the process, but not the threads that write dirty pages back later.
    """
    sample: Sample = {}
    cpu, begin = time.process_time(), time.perf_counter()
    yield sample
    sample["seconds"] = time.perf_counter() - begin
    sample["cpu_seconds"] = time.process_time() - cpu


def in_new_process(script: str, *arguments: object) -> Sample:
    """The sample that a script answers with :func:`answer`, run in a process of its own."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    sample: Sample = json.loads(done.stdout)
    return sample


def answer(sample: Sample) -> None:
    """Answer :func:`in_new_process`."""
    os.write(1, json.dumps(sample).encode())


def storage_nbytes() -> int:
    """Bytes that storage has read for this process so far, into its memory or into the page cache."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])


def interleave(
    result: Result,
    actions: Mapping[str, Callable[[], Sample]],
    plan: Plan,
    *,
    rounds: Mapping[str, int] | None = None,
    warm_up: bool = True,
) -> None:
    """Run every action once unmeasured, then in rounds: A1 B1 C1 A2 B2 C2 …

    An action that raises is left out from then on, and its error is recorded.

    Args:
        result: Where samples and errors go.
        actions: For each system, a function that runs it once and returns the sample.
        plan: How often to repeat.
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
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def status(field: str) -> int:
    """The bytes in a field of this process's ``/proc/self/status``."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) << 10
