"""Protects a checkpoint from deletion while it is read."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

from datastates._base import files, locks
from datastates.commit import manifest
from datastates.commit.newest import find
from datastates.errors import CheckpointNotFoundError, StorageError


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep other processes from deleting a checkpoint while it is read, if the file system has locks.

    Raises:
        CheckpointNotFoundError: ``path`` is no checkpoint, or is being deleted.
    """
    try:
        with files.syscall("open", path / manifest.FILE):
            file = files.open_file(path / manifest.FILE)
    except StorageError as error:
        manifest.refuse_missing(path, error)
        raise
    with file as fd:
        if locks.try_lock(fd, fcntl.LOCK_SH) is False or not locks.is_open(fd, path / manifest.FILE):
            raise CheckpointNotFoundError(f"{path} is being deleted")
        yield


def keep(find: Callable[[], Path | None], reader: contextlib.ExitStack) -> Path | None:
    """Keep the checkpoint that ``find`` returns from deletion until ``reader`` closes, as :func:`reading` does.

    If it is deleted before it can be kept, ``find`` is called again. Returns None if ``find`` does.
    """
    while (path := find()) is not None:
        try:
            reader.enter_context(reading(path))
            break
        except CheckpointNotFoundError:
            if path == find():
                raise
    return path


@contextlib.contextmanager
def kept(path: Path, step: int | None = None) -> Iterator[Path]:
    """``path`` if it is a file, else what :func:`find` returns, kept from deletion as by :func:`reading`."""
    if path.is_file():
        yield path
        return
    with contextlib.ExitStack() as reader:
        found = keep(lambda: find(path, step), reader)
        assert found is not None
        yield found
