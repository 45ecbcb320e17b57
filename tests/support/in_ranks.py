"""What the scripts of ranks share: how a rank ends, tells the test something, waits, and is broken."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from datastates import _native
from datastates._base import faults

# how long a rank waits for a condition, in seconds
PATIENCE = 60.0


def end() -> None:
    """Wait for the other ranks, and exit without the interpreter's shutdown, in which torch may abort."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def rank() -> int:
    return dist.get_rank()


def say(word: str, value: Any) -> None:
    """Tell the test a value, under a word."""
    print(json.dumps({"word": word, "value": value}), flush=True)


def together(action: Any) -> Any:
    """Let rank 0 do something, while the others wait."""
    result = action() if rank() == 0 else None
    dist.barrier()
    return result


def wait_for(condition: Any, what: str) -> None:
    """Wait until a condition holds; fails the rank if it does not in time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.005)


def arm(point: str, action: str, value: int = 0, nth: int = 1) -> None:
    """Arm a fault point, of the Python code or of the native core, from its nth hit on."""
    if "." in point:
        faults.arm(faults.Fault(point, action, value, nth))
    else:
        _native.arm_fault(point, action, value, nth)


@contextlib.contextmanager
def fault(point: str, action: str, value: int = 0, *, on: int | None = None) -> Iterator[None]:
    """Break or slow every system call of a point of the native core, on one rank or on all."""
    if on is None or on == rank():
        _native.arm_fault(point, action, value)
    try:
        yield
    finally:
        _native.clear_faults()
