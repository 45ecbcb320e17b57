"""Named fault points of the Python code, for tests.

A fault point stands before the step that it breaks. ``DATASTATES_FAULTS="store.rename=kill;write=fail:28@3"`` arms
points when :mod:`datastates.executor.executor` is imported, each as ``point=action[:value][@nth]``. The actions are
``kill`` (SIGKILL to this process), ``stop`` (SIGSTOP; it goes on after SIGCONT) and ``fail:ERRNO`` (an
:class:`OSError`). The native core lacks ``stop``, and also knows ``short``, ``eintr`` and ``delay:MILLISECONDS``. A
point without a dot belongs to it.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One armed point. It triggers once, at the ``nth`` hit (counted from 1)."""

    point: str
    action: str
    value: int = 0
    nth: int = 1


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_armed: dict[str, Fault] = {}
_hits: dict[str, int] = {}


def parse(text: str) -> list[Fault]:
    """Parse the value of ``DATASTATES_FAULTS``; raises ValueError for a part that does not parse."""
    faults = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        point, equals, rest = part.partition("=")
        rest, _, nth = rest.partition("@")
        action, _, value = rest.partition(":")
        if not (point and equals and action):
            raise ValueError(f"DATASTATES_FAULTS: {part!r} is not point=action[:value][@nth]")
        faults.append(Fault(point, action, int(value or 0), int(nth or 1)))
    return faults


def arm(fault: Fault) -> None:
    """Arm one point of the Python side; ValueError where it cannot do that action."""
    if fault.nth < 1:
        raise ValueError(f"{fault.point}: hits count from 1, not from {fault.nth}")
    if "." in fault.point and fault.action not in _SIGNALS and (fault.action != "fail" or fault.value <= 0):
        raise ValueError(
            f"{fault.point} can be armed with kill or fail:ERRNO, or with stop, not with {fault.action}:{fault.value}"
        )
    _armed[fault.point] = fault
    _hits[fault.point] = 0


def is_armed() -> bool:
    """Whether any point of the Python code is armed."""
    return bool(_armed)


def clear() -> None:
    """Disarm all points of the Python code."""
    _armed.clear()
    _hits.clear()


def hit(point: str, path: str) -> None:
    """Pass a fault point, which does nothing unless it is armed and this is its nth hit.

    Args:
        point: Name of the point.
        path: Path for the error.

    Raises:
        OSError: The point triggers with the action ``fail``.
    """
    if not _armed or point not in _armed:
        return
    fault = _armed[point]
    _hits[point] += 1
    if _hits[point] != fault.nth:
        return
    if fault.action in _SIGNALS:
        # to this thread, which then goes no further; another one would notice a signal to the process later
        signal.pthread_kill(threading.get_ident(), _SIGNALS[fault.action])
        return
    raise OSError(fault.value, os.strerror(fault.value), path)
