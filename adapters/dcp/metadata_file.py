"""``.metadata``: the file that makes a directory a checkpoint of torch.distributed.checkpoint, replaced at once."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from datastates._base import files as base_files
from datastates.errors import StorageError

_log = logging.getLogger("datastates")
FILE = ".metadata"
_publishing = threading.Lock()


def path_of(directory: Path, rank: int | None) -> Path:
    """Where it is; that of one rank where the ranks save without each other."""
    return directory / (FILE if rank is None else f"__{rank}{FILE}")


def read(path: Path) -> Metadata | None:
    """What is there; None when there is nothing, or nothing that can be read. It is a pickle, as torch's own is."""
    try:
        found = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except Exception as error:
        _log.warning("%s cannot be read, and is replaced: %s", path, error)
        return None
    return found if isinstance(found, Metadata) else None


def files(metadata: Metadata | None) -> set[str]:
    """The files that a checkpoint consists of besides."""
    storage = getattr(metadata, "storage_data", None) or {}
    return {info.relative_path for info in storage.values()}


def publish(
    path: Path, metadata: Metadata, results: Iterable[Sequence[WriteResult]], storage_meta: StorageMeta | None
) -> tuple[Metadata, StorageError | None]:
    """Let a directory be the checkpoint that was written to it: the old one or the new one, whatever happens.

    The files of the old one are deleted after that.

    Returns:
        What is stored; and what made it uncertain that it survives a power failure: then the files of both are kept.

    Raises:
        StorageError: It could not be written; the old one stands.
    """
    made = copy.copy(metadata)  # with what a planner of another framework has added to it
    made.storage_data = {result.index: result.storage_data for each in results for result in each}
    made.storage_meta = storage_meta
    made.version = CURRENT_DCP_VERSION
    new = path.with_name(f"{path.name}.tmp")  # as torch calls it
    with _publishing:
        old = files(read(path))
        new.unlink(missing_ok=True)
        try:
            base_files.write_file(new, pickle.dumps(made))
            with base_files.syscall("rename", path):
                os.replace(new, path)
        except StorageError:
            new.unlink(missing_ok=True)
            raise
        try:
            base_files.sync_directory(path.parent)
        except StorageError as error:
            return made, error
    for name in old - files(made):
        if Path(name).name == name:
            with contextlib.suppress(OSError):  # it is no part of a checkpoint any more
                (path.parent / name).unlink()
    return made, None
