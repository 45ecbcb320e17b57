"""Room for deeply nested values: pickling in Python takes several calls for each level."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

DEEPEST = 1000
"""Levels of nested containers that can be pickled. ``torch.save`` takes 496 with Python's default recursion limit."""
_CALLS_A_LEVEL = 8

_lock = threading.Lock()
_inside = 0
_usual = 0


@contextlib.contextmanager
def deeper() -> Iterator[None]:
    """Raise Python's recursion limit for :data:`DEEPEST` levels. Thread-safe.

    The limit belongs to the process. It is restored when the last thread has left the context.
    """
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
