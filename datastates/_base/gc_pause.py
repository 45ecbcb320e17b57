"""Pausing Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the garbage collector, for work that makes many objects at once and keeps them.

    New objects trigger full collections. A full collection visits every object of the process, which takes a tenth of a
    second or more where torch is loaded.

    Only the main thread pauses it. The collector is the whole process's: a training loop may switch it off while a
    background thread works, and the end of a pause there would switch it on again.
    """
    pauses = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
