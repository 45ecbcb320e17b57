"""Names a process, so that another process can tell that it is gone."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

_PROC = Path("/proc")


def own_name() -> str:
    """The name of this process: of its kernel's boot and its namespace of process numbers, its number and its start.

    It holds no white space. It is empty where ``/proc`` does not tell it.
    """
    return _name(os.getpid())


@functools.cache
def _name(process: int) -> str:
    return "" if (start := _start(process)) is None or not _kernel() else f"{_kernel()}/{process}:{start}"


@functools.cache
def _kernel() -> str:
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{(_PROC / 'self/ns/pid').stat().st_ino}"
    return ""


def is_gone(named: str) -> bool:
    """Whether a process has ended for certain. False for one that may live, such as one on another host."""
    kernel, _, own = named.partition("/")
    number, _, start = own.partition(":")
    if not kernel or kernel != _kernel() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's
        pass
    found = _start(int(number))
    return found is not None and found != start


def _start(process: int) -> str | None:
    """When a process started, in ticks since the boot; empty for one that has ended; None if that is hidden."""
    try:
        # the name of the program, in brackets, may hold anything
        state, *fields = (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "" if state in "ZX" else fields[18]
