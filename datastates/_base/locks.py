"""File locks: taken without waiting, held until released, and dropped by a forked child."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: set[int] = set()


def hold(lock: int) -> None:
    """Keep a descriptor, and the lock on it, until :func:`release`; a forked child drops it."""
    _held.add(lock)


def release(lock: int) -> None:
    """Let a lock go. Idempotent."""
    if lock in _held:
        _held.remove(lock)
        os.close(lock)


def _drop_held() -> None:
    # a child that outlives its parent must not keep what the parent left from being cleared away
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_held)


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Lock a file: False when somebody is in the way, None where the file system has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_open(fd: int, path: Path) -> bool:
    """Whether a descriptor is of the file that is at ``path`` now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
