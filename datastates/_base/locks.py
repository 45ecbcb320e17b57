"""File locks, taken without waiting. A forked child drops them, as it closes every ``files.Descriptor``."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Lock a file without waiting: True if locked, False if another holds it, None if it cannot be locked at all."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_open(fd: int, path: Path) -> bool:
    """Whether a descriptor refers to the file that is at ``path`` now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
