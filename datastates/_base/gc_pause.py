"""Pausing Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pause:
    """Ends a pause when it is forgotten. No line of Python runs then, at which an interrupt could come."""

    __del__ = staticmethod(gc.enable)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the garbage collector, for work that makes many objects at once and keeps them.

    New objects trigger full collections. A full collection visits every object of the process, which takes a tenth of a
    second or more where torch is loaded.

    Only the main thread pauses it. The collector is the whole process's: a training loop may switch it off while a
    background thread works, and the end of a pause there would switch it on again.
    """
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    pause = _Pause()
    gc.disable()
    try:
        yield
    finally:
        del pause
