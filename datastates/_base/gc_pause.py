"""Pausing Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the garbage collector, for work that makes many objects at once and keeps them.

    New objects trigger full collections. A full collection visits every object of the process, which takes a tenth of a
    second or more where torch is loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
