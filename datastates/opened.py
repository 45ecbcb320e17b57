"""Containers and checkpoints, opened: found, checked against the manifest and against themselves, not yet read."""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from datastates import container, directories, manifest, planner
from datastates.errors import CorruptError, FormatError, StorageError
from datastates.executor import read_bytes
from datastates.index import Index, StoredObject
from datastates.plan import U64, Chunks
from datastates.protocol import full_key


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """One container file, opened: its index has been checked."""

    path: Path
    nbytes: int
    index: Index
    index_crc: int
    index_offset: int

    @property
    def data_offset(self) -> U64:
        """Where each storage record's data begins, in file order."""
        return self.index.data_offset

    def name_record(self, record: int) -> str:
        """The keys that lie in a storage record, for an error about it."""
        table = self.index.shards
        keys = [table.row(i).key for i in np.flatnonzero(table.record == record)[:3].tolist()]
        return ", ".join(keys) or f"record {record}"

    def chunks(self, first: int, last: int) -> Chunks:
        """The checksummed chunks of the records from ``first`` to before ``last``."""
        index, run = self.index, slice(first, last)
        crcs = index.chunk_crc[int(index.first_chunk[first]) : int(index.first_chunk[last])]
        found = planner.plan_chunks(index.data_offset[run], index.record_nbytes[run], crcs)
        return replace(found, record=found.record + np.int32(first))

    def corrupt(self, key: str) -> CorruptError:
        """The error that says that what is stored under a key, or a part of the file, is damaged."""
        return CorruptError(f"{key!r} in {self.path} does not match its checksum", key=key, path=str(self.path))

    def read_object(self, stored: StoredObject) -> bytes:
        """The opcodes of an object, verified; raises CorruptError."""
        data = read_bytes(self.path)(stored.offset, stored.nbytes)
        if container.crc32(data) != stored.crc:
            raise self.corrupt(full_key(self.index.shards.providers[stored.provider], stored.key))
        return data


def open_container(path: Path) -> Container:
    """Open one container file.

    Raises:
        FormatError: It is none, or damaged; the message names the path.
        StorageError: It cannot be read.
    """
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise StorageError(error.errno or 0, "stat", str(path)) from error
    try:
        index, footer = container.open_index(read_bytes(path), nbytes)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    return Container(path, nbytes, index, footer.crc, footer.offset)


def lost_container(path: Path, rank: int, ranks: int) -> StorageError:
    """The error that says that a rank's container is missing."""
    what = f"{path.name}, the container of rank {rank} of {ranks}, is missing, and what it held with it"
    return StorageError(errno.ENOENT, "open", str(path), f"{path.parent} is damaged: {what}: {path}")


def open_checkpoint(path: Path) -> tuple[manifest.Manifest, list[Container]]:
    """Open a checkpoint directory: its manifest, and every container that it names.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        FormatError: A file is not the one that the manifest names, or damaged.
        StorageError: One is missing, or cannot be read.
    """
    opened = manifest.open(path)
    containers = []
    for entry in opened.containers:
        try:
            one = open_container(path / entry.file)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise lost_container(path / entry.file, entry.rank, opened.world_size) from error
        identity = {"step": opened.step, "rank": entry.rank, "world_size": opened.world_size, "attempt": opened.attempt}
        if (one.nbytes, one.index_crc, one.index.identity) != (entry.nbytes, entry.index_crc32, identity):
            raise FormatError(f"{one.path} is not the container that the manifest names")
        containers.append(one)
    return opened, containers


def open_all(path: Path) -> list[Container]:
    """The containers at a path: of a checkpoint directory, of the newest in a directory of them, or one file."""
    return [open_container(path)] if path.is_file() else open_checkpoint(directories.find(path))[1]
