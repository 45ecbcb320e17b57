"""Holds the storage up until a test has seen what it wants to see. So events tell the order, and not clocks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Iterator

from datastates import _native, checkpointer
from datastates.executor.jobs import WriteJob
from datastates.saving import engine

MINUTE = 60_000
"""Milliseconds; far longer than any test needs to see what it wants to see."""
GATE = (WriteJob, "gate")
"""The wait of an optimizer, or of ``gate()``, for the capture."""
END = (engine, checkpointer), "wait_ended"
"""The wait for the end of a snapshot, as in ``close()`` and ``restore()``."""


@contextlib.contextmanager
def held(
    point: str = "write", count: int = 0, *, until: tuple[object, str | tuple[str, ...]] | None = None
) -> Iterator[None]:
    """Hold everything up that passes a fault point of the native core, until the block ends.

    Args:
        point: The fault point. "write" also holds up the capture of what the host cache cannot hold; "capture" that of
            all lazy state; "host_read" all reads of host memory.
        count: How many passages are held up; 0 for all.
        until: An owner, or several, and the name of a method or function of theirs, or several: its first call, which
            must wait for what is held up, lets everything go.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_native.clear_faults)
        if until is not None:
            for owner, name in itertools.product(*(each if isinstance(each, tuple) else (each,) for each in until)):
                stack.enter_context(_released_by(owner, name))
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
def _released_by(owner: object, name: str) -> Iterator[None]:
    method = getattr(owner, name)

    def wait(*arguments: object, **named: object) -> object:
        _native.clear_faults()
        return method(*arguments, **named)

    setattr(owner, name, wait)
    try:
        yield
    finally:
        setattr(owner, name, method)
