"""``.metadata``, the file that makes a directory a checkpoint of torch.distributed.checkpoint: read, replace."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
import threading
from collections.abc import Iterable, Sequence

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from datastates._base import log
from datastates.commit import decision
from datastates.errors import StorageError
from datastates.storage import Location, folders_of, store_of

FILE = ".metadata"
PATIENCE = decision.Patience()
"""How long a store is asked to make it."""
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
        failure, or a store did not tell whether it has it: then the files of both checkpoints are kept.

    Raises:
        StorageError: ``.metadata`` could not be written; the previous checkpoint stands. In a store, the new files are
            deleted.
    """
    made = copy.copy(metadata)  # keeps attributes that another framework's planner added
    made.storage_data = {result.index: result.storage_data for each in results for result in each}
    made.storage_meta = storage_meta
    made.version = CURRENT_DCP_VERSION
    put = _make if path.scheme else _rename
    with _publishing:
        old, new = files(read(path)), files(made)
        try:
            error = put(path, pickle.dumps(made))
        except StorageError:
            if path.scheme:  # else a rename may have been done nevertheless, as on NFS
                _remove(path.parent, new - old)
            raise
    if error is None:
        _remove(path.parent, old - new)
    return made, error


def _rename(path: Location, data: bytes) -> StorageError | None:
    """Replace a file at once; returns an error that leaves open whether that lasts."""
    new = path.with_name(f"{path.name}.tmp")  # the name that torch uses
    store = folders_of(path)
    store.remove(new, missing_ok=True)
    try:
        store.create(new, data)
        store.rename(new, path)
    except StorageError:
        store.remove(new, missing_ok=True)
        raise
    try:
        store.sync_folder(path.parent)
    except StorageError as error:
        return error
    return None


def _make(path: Location, data: bytes) -> StorageError | None:
    """Make or replace an object; returns an error that leaves open whether the store has it, or will have it."""
    store, found = store_of(path), data
    is_there = store.is_file(path)
    try:
        if is_there:
            store.replace(path, data)
        else:
            found = decision.decide(path, data, PATIENCE.fence, PATIENCE)
        store.sync_folder(path.parent)
    except StorageError as error:
        if type(error) is StorageError and error.errno in decision.DENIED:
            raise
        return None if _holds(path, data) else error
    if found != data:
        raise StorageError(errno.EEXIST, "create", str(path))
    return None


def _holds(path: Location, data: bytes) -> bool:
    """Whether an object has these bytes, though the answer to its replacement was lost."""
    try:
        return store_of(path).read_all(path) == data
    except StorageError:
        return False


def _remove(folder: Location, names: Iterable[str]) -> None:
    """Remove files that no checkpoint needs any more."""
    for name in names:
        if os.path.basename(name) == name:
            with contextlib.suppress(OSError):
                store_of(folder).discard([folder / name])
