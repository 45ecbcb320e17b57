"""Which format a path holds. A checkpoint of this package, or a directory of them, is found first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from datastates.commit import directories
from datastates.formats import own
from datastates.formats.format import Format

FORMATS: tuple[Format, ...] = (own,)
"""All formats. The first that recognises a path is taken."""


def recognise(path: Path) -> Format | None:
    """The format of a file or a folder; None for one that no format recognises.

    Raises:
        StorageError: It cannot be read.
    """
    return next((one for one in FORMATS if one.recognises(path)), None)


@contextlib.contextmanager
def kept(path: Path, step: int | None = None) -> Iterator[tuple[Format, Path]]:
    """The format and the path of the checkpoint that a path means.

    A checkpoint of this package, be it ``path`` or the newest in it or the newest of ``step``, is kept from deletion
    until the block ends.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or none of that step.
        StorageError: The path cannot be read.
    """
    there = path.is_file() or path.is_dir()
    if there and (found := recognise(path)) not in (own, None):
        assert found is not None
        yield found, path
        return
    with directories.kept(path, step) as chosen:
        yield own, chosen
