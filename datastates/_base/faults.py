"""Named fault points of the Python side, beside the steps they break; for tests.

``DATASTATES_FAULTS="manifest.rename=kill;write=fail:28@3"`` arms points at import: ``point=action[:value][@nth]``.
Actions are ``kill`` (SIGKILL to this process), ``fail:ERRNO`` (an :class:`OSError`) and, in the native core, ``short``,
``eintr`` and ``delay:MILLISECONDS``. A point without a dot belongs to the native core and is armed by
:mod:`datastates.executor.executor`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One armed point: it triggers at the ``nth`` hit (from 1) and only then."""

    point: str
    action: str
    value: int = 0
    nth: int = 1


_armed: dict[str, Fault] = {}
_hits: dict[str, int] = {}


def parse(text: str) -> list[Fault]:
    """Parse the value of ``DATASTATES_FAULTS``; ValueError names a part that does not parse."""
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
    """Arm one point of the Python side."""
    _armed[fault.point] = fault
    _hits[fault.point] = 0


def clear() -> None:
    """Disarm all points of the Python side."""
    _armed.clear()
    _hits.clear()


def hit(point: str, path: str) -> None:
    """Pass the named point: nothing unless it is armed and this is its nth hit."""
    if not _armed or point not in _armed:
        return
    fault = _armed[point]
    _hits[point] += 1
    if _hits[point] != fault.nth:
        return
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(fault.value, os.strerror(fault.value), path)


for _fault in parse(os.environ.get("DATASTATES_FAULTS", "")):
    arm(_fault)
