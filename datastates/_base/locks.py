"""File locks. They are taken without waiting and held until released; a forked child drops them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: set[int] = set()


def hold(lock: int) -> None:
    """Keep a descriptor and its lock until :func:`release`; a forked child closes it."""
    _held.add(lock)


def release(lock: int) -> None:
    """Close a descriptor that :func:`hold` kept, which releases its lock. Idempotent."""
    if lock in _held:
        _held.remove(lock)
        os.close(lock)


def _drop_held() -> None:
    # otherwise a child that outlives its parent would keep others from deleting what the parent left
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_held)


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
