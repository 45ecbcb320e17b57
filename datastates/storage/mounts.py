"""The mounts that this process has used, to notice that one is lost: a path then leads to what lies below it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

from datastates.errors import StorageError
from datastates.storage.location import PathLike

_ESCAPED = re.compile(rb"\\([0-7]{3})")
_used: set[str] = set()
_places: dict[str, tuple[int, ...]] = {}
_MOST = 1 << 12


def is_known(path: PathLike, place: tuple[int, ...]) -> bool:
    """Whether a folder is where it was when it was remembered."""
    return _places.get(os.fspath(path)) == place


def remember(path: PathLike, place: tuple[int, ...]) -> None:
    """Keep the place of a folder, and the mount under it."""
    if mount := under(path):
        _used.add(mount)
    if len(_places) >= _MOST:
        _places.clear()
    _places[os.fspath(path)] = place


def refuse_lost(path: PathLike) -> None:
    """Raise StorageError if a path leads into a mount point that was remembered and is mounted no longer."""
    real = os.path.realpath(path)
    now = _points()
    if now and (lost := _deepest(real, _used - now)) and len(lost) > len(_deepest(real, now)):
        raise StorageError(
            errno.ENOENT, "mkdir", os.fspath(path), f"{os.fspath(path)} is not there: the mount at {lost} is lost"
        )


def under(path: PathLike) -> str:
    """The mount point that holds a path; empty if the system does not tell."""
    return _deepest(os.path.realpath(path), _points())


def _points() -> set[str]:
    """The mount points of this process."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
        return {os.fsdecode(_ESCAPED.sub(lambda m: bytes([int(m[1], 8)]), line.split()[4])) for line in lines}
    return set()


def _deepest(path: str, points: set[str]) -> str:
    while path not in points:
        if path in ("/", ""):
            return ""
        path = os.path.dirname(path)
    return path
