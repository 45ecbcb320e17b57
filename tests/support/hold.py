"""Holds the storage up until a test has seen what it wants to see. So events tell the order, and not clocks."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator

from datastates import _native
from datastates.executor.jobs import WriteJob
from datastates.saving.course import Course

MINUTE = 60_000
"""Milliseconds; far longer than any test needs to see what it wants to see."""
GATE = (WriteJob, "gate")
"""The wait of an optimizer, or of ``gate()``, for the capture."""
END = (Course, "wait_ended")
"""The wait for the end of a snapshot, as in ``close()`` and ``restore()``."""


@contextlib.contextmanager
def held(point: str = "write", count: int = 0, *, until: tuple[type, str] | None = None) -> Iterator[None]:
    """Hold everything up that passes a fault point of the native core, until the block ends.

    Args:
        point: The fault point. "write" also holds up the capture of what the host cache cannot hold; "capture" that of
            all lazy state; "host_read" all reads of host memory.
        count: How many passages are held up; 0 for all.
        until: The first call of this method, which must wait for what is held up, lets everything go.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_native.clear_faults)
        if until is not None:
            stack.enter_context(_released_by(*until))
        if point == "capture":
            _native.arm_fault(point, "fail", errno.EAGAIN)
        else:
            _native.arm_fault(point, "delay", MINUTE, 1, count)
        yield


def hold_until_exit(point: str) -> None:
    """Hold everything up that passes a fault point of the native core, until this process begins to exit."""
    _native.arm_fault(point, "delay", MINUTE)
    # what is registered last runs first: before the exit of thread pools, which waits
    threading._register_atexit(_native.clear_faults)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _released_by(owner: type, name: str) -> Iterator[None]:
    method = getattr(owner, name)

    def wait(*arguments: object, **named: object) -> object:
        _native.clear_faults()
        return method(*arguments, **named)

    setattr(owner, name, wait)
    try:
        yield
    finally:
        setattr(owner, name, method)
