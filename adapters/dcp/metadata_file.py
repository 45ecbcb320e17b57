"""``.metadata``, the file that makes a directory a checkpoint of torch.distributed.checkpoint: read, replace."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import threading
from collections.abc import Iterable, Sequence

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from datastates._base import log
from datastates.errors import StorageError
from datastates.storage import Location, folders_of, store_of

FILE = ".metadata"
_publishing = threading.Lock()


def path_of(directory: Location, rank: int | None) -> Location:
    """The path of ``.metadata``; with ``rank``, of that rank's own file, where ranks save without collectives."""
    return directory / (FILE if rank is None else f"__{rank}{FILE}")


def read(path: Location) -> Metadata | None:
    """Unpickle the metadata; None if the file is missing, unreadable or holds something else."""
    try:
        found = pickle.loads(store_of(path).read_all(path))
    except Exception as error:
        if store_of(path).exists(path):
            log.warning("%s cannot be read, and is replaced: %s", path, error)
        return None
    return found if isinstance(found, Metadata) else None


def files(metadata: Metadata | None) -> set[str]:
    """The names of the files that a checkpoint's metadata refers to."""
    storage = getattr(metadata, "storage_data", None) or {}
    return {info.relative_path for info in storage.values()}


def publish(
    path: Location, metadata: Metadata, results: Iterable[Sequence[WriteResult]], storage_meta: StorageMeta | None
) -> tuple[Metadata, StorageError | None]:
    """Commit a checkpoint: replace ``.metadata`` atomically, then delete the previous checkpoint's files.

    Args:
        path: The file to replace.
        metadata: The metadata that the planner made.
        results: For each rank, the places of the items that it wrote.
        storage_meta: Identifies the save.

    Returns:
        The stored metadata, and None. The second is an error instead if the new ``.metadata`` may not survive a power
        failure: then the files of both checkpoints are kept.

    Raises:
        StorageError: ``.metadata`` could not be written; the previous checkpoint stands.
    """
    made = copy.copy(metadata)  # keeps attributes that another framework's planner added
    made.storage_data = {result.index: result.storage_data for each in results for result in each}
    made.storage_meta = storage_meta
    made.version = CURRENT_DCP_VERSION
    new = path.with_name(f"{path.name}.tmp")  # the name that torch uses
    store = folders_of(path)
    with _publishing:
        old = files(read(path))
        store.remove(new, missing_ok=True)
        try:
            store.create(new, pickle.dumps(made))
            store.rename(new, path)
        except StorageError:
            store.remove(new, missing_ok=True)
            raise
        try:
            store.sync_folder(path.parent)
        except StorageError as error:
            return made, error
    for name in old - files(made):
        if os.path.basename(name) == name:
            with contextlib.suppress(OSError):  # no checkpoint needs the file any more
                store.remove(path.parent / name)
    return made, None
