"""Python's garbage collector, and when it should wait."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect no garbage meanwhile, for work that makes many objects at once and keeps them.

    Each new object counts towards a full collection, which looks at every object of the process: a tenth of a second
    and more where torch is loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
