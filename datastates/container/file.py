"""Opens a container file: reads and checks its index, but not its data."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from datastates._base.columns import U64
from datastates._base.sizes import CHUNK
from datastates._base.tasks import each
from datastates.container import archive, checksums, pickle_reader, pickle_writer
from datastates.container.index import Index, StoredObject, decode_index
from datastates.container.object_entry import ObjectEntry
from datastates.container.table import Row, ShardTable
from datastates.errors import CorruptError, FormatError, StorageError
from datastates.planning import read
from datastates.planning.plans import Chunks
from datastates.state.shards import StoredArray, full_key
from datastates.state.strides import span
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.stores import reader

_READ_AT_ONCE = 16
"""Indexes to read at a time: each waits for one read of some ten KiB."""
_BEFORE = 16 << 10
"""Bytes before an index that are kept until it is decoded: ``data.pkl`` of most containers lies there."""


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """An opened container file, whose index has been checked."""

    path: Location
    nbytes: int
    index: Index
    index_crc: int
    index_offset: int
    pickle: bytes | None = None
    """The data of ``data.pkl``, where that came with the index."""

    @property
    def data_offset(self) -> U64:
        """File offset in bytes of each storage record's data, in file order."""
        return self.index.records.data_offset

    @property
    def record_nbytes(self) -> U64:
        """Length of each storage record's data in bytes."""
        return self.index.records.nbytes

    @property
    def shards(self) -> ShardTable:
        """The table of the arrays in the records."""
        return self.index.shards

    @property
    def objects(self) -> list[ObjectEntry]:
        """The objects of the container, in the order of its index."""
        names, rank = self.index.shards.providers, int(self.index.identity["rank"])
        return [
            ObjectEntry(
                key=full_key(names[o.provider], o.key),
                rank=rank,
                survey=partial(self._survey, o),
                stored=(o.nbytes, o.crc),
                offset=o.offset,
                nbytes=o.nbytes,
                crc=o.crc,
            )
            for o in self.index.objects
        ]

    def _survey(self, stored: StoredObject, resolve: Callable[[StoredArray], object]) -> tuple[Any, bool]:
        # a survey builds no objects of other classes, even with trust="all", so it runs no code of theirs
        return pickle_reader.survey(pickle_writer.stream(self.read_object(stored)), resolve, trust="all")

    @property
    def checked(self) -> bool:
        """True: the checksums of chunks verify all data that is read."""
        return True

    def record_crc(self, record: int) -> int:
        """CRC-32 of a whole storage record."""
        return int(self.index.records.crc[record])

    def name_record(self, record: int) -> str:
        """Keys of at most three arrays in a storage record."""
        return self.shards.names_in(record)

    def chunks(self, first: int, last: int) -> Chunks:
        """The checksummed chunks of the records from ``first`` to before ``last``."""
        index, run = self.index, slice(first, last)
        crcs = index.chunk_crc[int(index.first_chunk[first]) : int(index.first_chunk[last])]
        found = read.plan_chunks(index.records.data_offset[run], index.records.nbytes[run], crcs)
        return replace(found, record=found.record + np.int32(first))

    def corrupt(self, key: str) -> CorruptError:
        """The error for damaged data; ``key`` names a tensor, an object or a part of the file."""
        return CorruptError(f"{key!r} in {self.path} does not match its checksum", key=key, path=str(self.path))

    def read_pickle(self, offset: int, nbytes: int) -> bytes:
        """Bytes of ``data.pkl``, not verified; ``offset`` is one of the file."""
        if self.pickle is None:
            return store_of(self.path).read(self.path, offset, nbytes)
        return self.pickle[offset - self.index.pickle_offset :][:nbytes]

    def read_object(self, stored: StoredObject) -> bytes:
        """Read the opcodes of an object; raises CorruptError if they do not match their checksum."""
        data = self.read_pickle(stored.offset, stored.nbytes)
        if checksums.crc32(data) != stored.crc:
            raise self.corrupt(full_key(self.index.shards.providers[stored.provider], stored.key))
        return data

    def read_row(self, row: Row) -> memoryview:
        """Read the bytes from a row's first element to its last, and verify their chunks; raises CorruptError."""
        index, nbytes = self.index, span(row.shape, row.stride) * row.dtype.itemsize
        if not nbytes:
            return memoryview(b"")
        first = row.offset // CHUNK
        begin = first * CHUNK
        end = min(-(-(row.offset + nbytes) // CHUNK) * CHUNK, int(index.records.nbytes[row.record]))
        data = memoryview(
            store_of(self.path).read(self.path, int(index.records.data_offset[row.record]) + begin, end - begin)
        )
        crcs = index.chunk_crc[int(index.first_chunk[row.record]) + first :]
        for at, crc in zip(range(0, len(data), CHUNK), crcs, strict=False):
            if checksums.crc32(data[at : at + CHUNK]) != crc:
                raise self.corrupt(row.key)
        return data[row.offset - begin :][:nbytes]


def open_container(path: Location) -> Container:
    """Open one container file.

    Raises:
        FormatError: The file is no container, or a damaged one; the message names the path.
        StorageError: The file cannot be read.
    """
    return _decoded(read_index(path))


@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """The data that a container is opened by: the file's length, the encoded index, bytes before it, and the footer."""

    path: Location
    nbytes: int
    before: bytes
    index: bytes
    footer: archive.Footer


def read_index(path: Location, expected: int | None = None) -> EncodedIndex:
    """Read the length, index and footer of a container; raises as :func:`open_container` does.

    ``expected``: the length that it should have.
    """
    nbytes, ending = store_of(path).ending(path, archive.GUESS, expected)
    with _naming(path):
        index, footer = archive.find_index(ending, reader(path), nbytes)
    at = max(0, footer.offset - (nbytes - len(ending)))
    return EncodedIndex(path, nbytes, ending[max(0, at - _BEFORE) : at], index, footer)


def _decoded(read: EncodedIndex) -> Container:
    with _naming(read.path):
        index = decode_index(read.index, read.nbytes)
    begin = index.pickle_offset - (read.footer.offset - len(read.before))
    end = begin + index.pickle_nbytes
    pickle = read.before[begin:end] if 0 <= begin <= end <= len(read.before) else None
    return Container(read.path, read.nbytes, index, read.footer.crc, read.footer.offset, pickle)


@contextlib.contextmanager
def _naming(path: Location) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Named:
    """A container that a manifest or a catalog names: its path, length, CRC-32 of its index, and identity.

    The identity has at least the rank and the number of ranks. Each of its fields is compared.
    """

    path: Location
    nbytes: int
    index_crc: int
    identity: dict[str, Any]


def open_each(named: Sequence[Named]) -> list[Container | None]:
    """Open containers, several at a time; None for each whose file is missing.

    Raises:
        FormatError: A file is another container, or none, or damaged. The first such error is raised.
        StorageError: A file cannot be read.
    """
    # threads only read: they decode more slowly together than one alone
    return list(map(_checked, named, each(_read_named, named, _READ_AT_ONCE)))


def open_named(named: Sequence[Named]) -> list[Container]:
    """Open containers, several at a time.

    Raises:
        FormatError: A file is damaged, or is not the container that ``named`` describes.
        StorageError: A file is missing or cannot be read.
    """
    containers = []
    for one, container in zip(named, open_each(named), strict=True):
        if container is None:
            raise lost_container(one.path, one.identity["rank"], one.identity["world_size"])
        containers.append(container)
    return containers


def _read_named(named: Named) -> EncodedIndex | None:
    try:
        return read_index(named.path, named.nbytes)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def _checked(named: Named, read: EncodedIndex | None) -> Container | None:
    if read is None:
        return None
    one = _decoded(read)
    identity = {name: one.index.identity[name] for name in named.identity}
    if (one.nbytes, one.index_crc, identity) != (named.nbytes, named.index_crc, named.identity):
        raise FormatError(f"{named.path} is not the container that the manifest names")
    return one


def lost_container(path: Location, rank: int, ranks: int) -> StorageError:
    """The error for a rank's container that is missing."""
    what = f"{path.name}, the container of rank {rank} of {ranks}, is missing, with all that it held"
    return StorageError(errno.ENOENT, "open", str(path), f"{path.parent} is damaged: {what}: {path}")
