"""Values nested as deeply as ``torch.save`` takes them: pickling in Python takes several calls a level."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

DEEPEST = 1000
"""Containers within containers, at most. ``torch.save`` takes 496 with the interpreter's usual limit."""
_CALLS_A_LEVEL = 8

_lock = threading.Lock()
_inside = 0
_usual = 0


@contextlib.contextmanager
def deeper() -> Iterator[None]:
    """Room for calls that many levels deep: the limit is the process's, and is put back when the last one is done."""
    global _inside, _usual
    with _lock:
        _inside += 1
        if _inside == 1:
            _usual = sys.getrecursionlimit()
            sys.setrecursionlimit(_usual + _CALLS_A_LEVEL * DEEPEST)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                sys.setrecursionlimit(_usual)
