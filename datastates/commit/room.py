"""Tells of a full disk: how much a snapshot needs, how much is free, and what could go."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from datastates.commit import manifest
from datastates.errors import CommitError, DatastatesError, StorageError
from datastates.storage import folders_of
from datastates.storage.location import Location

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk or a quota is full, on this rank or on another that has told of it."""
    if isinstance(error, StorageError):
        return error.errno in _FULL
    return isinstance(error, CommitError) and any(os.strerror(number) in str(error) for number in _FULL)


def explain(error: BaseException, needed: int, root: Location, more: str) -> None:
    """Add to a StorageError of a full disk how many bytes are needed and free, and ``more``."""
    if isinstance(error, StorageError):
        free = None
        with contextlib.suppress(StorageError):
            free = folders_of(root).free(root)
        has = "" if free is None else f", and {size(free)} are free in {root}"
        error.strerror = f"{error.strerror}; the file needs {size(needed)}{has}{more}"


def taken(paths: Sequence[Location]) -> str:
    """How many checkpoints these are, and how much they take, by their manifests."""
    total = 0
    for path in paths:
        with contextlib.suppress(DatastatesError):
            total += manifest.open(path).nbytes
    return f"{len(paths)} older checkpoint{'s' * (len(paths) != 1)} ({size(total)})"


def size(nbytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
