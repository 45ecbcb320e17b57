"""Which format a path holds. A checkpoint of this package, or a directory of them, is found first."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from datastates._base.files import storage_errors
from datastates.commit import directories, protection
from datastates.errors import StorageError
from datastates.formats import (
    dcp,
    deepspeed,
    hugging_face,
    lightning,
    megatron,
    own,
    safetensors_file,
    torch_file,
    trainer,
)
from datastates.formats.format import Format

FORMATS: tuple[Format, ...] = (
    own,
    megatron,
    dcp,
    trainer,
    deepspeed,
    hugging_face,
    lightning,
    torch_file,
    safetensors_file,
)
"""All formats. The first that recognises a path is taken."""


def recognise(path: Path) -> Format | None:
    """The format of a file or a folder that is one checkpoint; None for one that no format recognises.

    A directory of this package's checkpoints is none of another format, whatever else lies in it.

    Raises:
        StorageError: It cannot be read.
    """
    with storage_errors("open", path):
        if not own.recognises(path) and directories.is_root(path):
            return None
        return next((one for one in FORMATS if one.recognises(path)), None)


def others(root: Path, known: Collection[str]) -> dict[str, str]:
    """The entries of a directory that are checkpoints of other formats, and what they are; without those in ``known``.

    What cannot be read is left out.
    """
    found = {}
    for path in sorted(root.iterdir()):
        if path.name not in known:
            with contextlib.suppress(StorageError):
                if (kind := other(path)) is not None:
                    found[path.name] = kind.NAME
    return found


def other(path: Path) -> Format | None:
    """The format of a path, if it is not this package's; raises as :func:`recognise` does."""
    kind = recognise(path)
    return None if kind is own else kind


@contextlib.contextmanager
def kept(path: Path, step: int | None = None) -> Iterator[tuple[Format, Path]]:
    """The format and the path of the checkpoint that a path means.

    A checkpoint of this package, be it ``path`` or the newest in it or the newest of ``step``, is kept from deletion
    until the block ends.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or none of that step.
        StorageError: The path cannot be read.
    """
    if (found := other(path)) is not None:
        yield found, path
        return
    with protection.kept(path, step) as chosen:
        yield own, chosen
