"""A checkpoint of torch.distributed.checkpoint: ``.metadata``, and files of archives of one tensor each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from datastates._base.cached import cached_property
from datastates.container import pickle_reader
from datastates.container.object_entry import ObjectEntry
from datastates.container.pickle_reader import Trust
from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError, naming
from datastates.executor.executor import Executor
from datastates.formats import dcp_metadata
from datastates.formats.archive_ends import opened_ends
from datastates.formats.archives import DATA, PICKLE, Archive, ArchivedTensor, check_place, find_tensor, open_archive
from datastates.formats.dcp_metadata import Chunk
from datastates.formats.foreign import Foreign
from datastates.formats.foreign_file import ForeignFile, whole
from datastates.formats.format import Problem
from datastates.formats.record_file import Record
from datastates.formats.seen import Seen
from datastates.state import memory
from datastates.state.new_memory import Into
from datastates.state.shards import ArrayRef, Shard, StoredArray
from datastates.state.strides import span
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.stores import reader

NAME = "a checkpoint of torch.distributed.checkpoint"


def recognises(seen: Seen) -> bool:
    """Whether a folder has the file ``.metadata`` of DCP."""
    return seen.has(dcp_metadata.FILE)


def open(path: Location) -> DcpCheckpoint:
    """Open a checkpoint folder of DCP.

    Raises:
        FormatError: A file is damaged or cannot be read without running code; the message names the file.
        StorageError: A file is missing or cannot be read; the message names it.
    """
    return DcpCheckpoint(NAME, path)


class DcpCheckpoint(Foreign):
    """An opened checkpoint of DCP. Its keys are DCP's fully qualified names."""

    files: Sequence[DcpFile]

    def __init__(self, format: str, path: Location) -> None:
        """Read the metadata, and find all tensors; raises as :func:`open` does."""
        by_file: dict[str, list[Chunk]] = {}
        for chunk in dcp_metadata.read_chunks(path):
            by_file.setdefault(chunk.file, []).append(chunk)
        for name in by_file:
            if Location(name).name != name:
                raise FormatError(f"{path / dcp_metadata.FILE} names {name!r}, which is no file beside it")
        super().__init__(format, path, [DcpFile(path / name, chunks) for name, chunks in sorted(by_file.items())])

    def load(self, executor: Callable[[int], Executor], *, trust: Trust, into: Into) -> dict[str, Any]:
        """Read all tensors and objects, by full key."""
        blobs = [(key, blob) for file in self.files for key, blob in file.blobs.items()]
        for key, blob in blobs:
            if blob.unreadable is not None:
                raise FormatError(f"{key!r} in {blob.path}: {blob.unreadable}. open() reads the other tensors")
            blob.survey(lambda stored: stored, trust, with_torch=into.with_torch)
        found: dict[str, Any] = super().load(executor, trust=trust, into=into)
        seen: set[int] = set()
        for key, array in found.items():
            if id(array) in seen:  # tied tensors have memory of their own, as from torch's reader
                found[key] = copy.deepcopy(array)
            seen.add(id(array))
        return found | {key: blob.load(trust, into) for key, blob in blobs}

    def verify(self, progress: Callable[[int], object]) -> Iterator[Problem]:
        """Verify the tensors as :meth:`Foreign.verify` does, and compare each object with its checksum."""
        yield from super().verify(progress)
        for file in self.files:
            for key, blob in file.blobs.items():
                try:
                    if blob.unreadable is None:
                        blob.verify()
                except FormatError as error:
                    yield Problem(file.path, key, f"is damaged: {error}")


class DcpFile(ForeignFile):
    """One opened file of a checkpoint of DCP.

    Attributes:
        blobs: Its objects, by key.
    """

    def __init__(self, path: Location, chunks: Sequence[Chunk]) -> None:
        """Find the tensors in a file; raises as :func:`open` does."""
        nbytes = store_of(path).length(path)
        for chunk in chunks:
            if not 0 <= chunk.offset <= chunk.offset + chunk.nbytes <= nbytes:
                raise FormatError(f"{path} has {nbytes} bytes, and {chunk.key!r} ends after them: it was cut short")
        blobs = [chunk for chunk in chunks if chunk.dtype is None]
        records: list[Record] = []
        tensors: list[tuple[int, Shard]] = []
        places: dict[tuple[int, int], list[Chunk]] = {}  # tied tensors are at one place
        for chunk in chunks:
            if chunk.dtype is not None:
                places.setdefault((chunk.offset, chunk.nbytes), []).append(chunk)
        if both := [blob.key for blob in blobs if (blob.offset, blob.nbytes) in places]:
            raise FormatError(f"{path}: the object {both[0]!r} is at the place of a tensor")
        for place, read in opened_ends(reader(path), sorted(places)):
            found = None
            for chunk in places[place]:
                with naming(f"{chunk.key!r} in {path}"):
                    found = found or _found(path, chunk, read)
                    if found is None:
                        blobs.append(chunk)
                    else:
                        tensors.append((len(records), _shard(chunk, found.array)))
            if found is not None:
                records.append(Record(place[0] + found.offset, found.nbytes, found.crc))
        self.blobs = {chunk.key: _object(path, chunk) for chunk in blobs}
        entries = [blob.entry(key) for key, blob in self.blobs.items()]
        super().__init__(path, nbytes, records, tensors, entries)


def _object(path: Location, chunk: Chunk) -> ArchivedObject:
    """Make an object of a stored item that is no plain tensor, with the reason if it cannot be built."""
    why = None
    if chunk.transformed:
        why = "it is stored through an extension, which only torch reads"
    elif chunk.shape != chunk.of:
        why = "it is a tensor of a class of its own, and was saved in parts: only torch reads it"
    return ArchivedObject(path, chunk.offset, chunk.nbytes, why)


def _found(path: Location, chunk: Chunk, read: Callable[[int, int], bytes]) -> ArchivedTensor | None:
    """The tensor in an archive; None if the stored item is no plain tensor."""
    if chunk.transformed:
        return None
    found = find_tensor(read, chunk.nbytes)
    if found is None:
        _object(path, chunk).check()
    elif span(found.array.shape, found.array.stride) < math.prod(found.array.shape):
        raise FormatError("its elements overlap")
    return found


def _shard(chunk: Chunk, array: StoredArray) -> Shard:
    """Describe a stored part of a tensor; raises FormatError if it is not as the metadata says."""
    if (array.dtype, array.shape) != (chunk.dtype, chunk.shape):
        raise FormatError(f"it is of type {array.dtype} and shape {array.shape}, which the metadata does not say")
    return replace(whole(chunk.key, array), global_shape=chunk.of, offset=chunk.begin)


class ArchivedObject:
    """An object in an archive.

    Attributes:
        path: The file.
        offset, nbytes: The archive's place in the file, in bytes.
        unreadable: Why the object cannot be built; None if it can.
    """

    def __init__(self, path: Location, offset: int, nbytes: int, unreadable: str | None = None) -> None:
        """Remember the archive's place; nothing is read yet."""
        self.unreadable = unreadable
        self.path = path
        self.offset = offset
        self.nbytes = nbytes

    @cached_property
    def _archive(self) -> Archive:
        read = reader(self.path)
        archive = open_archive(lambda at, size: read(self.offset + at, size), self.nbytes, largest=self.nbytes)
        if archive is None or PICKLE not in archive.nbytes or not archive.is_little:
            raise FormatError("it is no object that torch.save wrote")
        return archive

    def entry(self, key: str) -> ObjectEntry:
        """The entry that lists this object under ``key`` among the objects of a file."""
        return ObjectEntry(key, 0, self.survey, self, self.offset, self.nbytes)

    def __eq__(self, other: object) -> bool:
        """Whether two archives have the same bytes. Reads both."""
        if not isinstance(other, ArchivedObject) or self.nbytes != other.nbytes:
            return False
        one, two = (store_of(each.path).read(each.path, each.offset, each.nbytes) for each in (self, other))
        return one == two

    def survey(
        self, resolve: Callable[[StoredArray], object], trust: Trust = "all", *, with_torch: bool = True
    ) -> tuple[Any, bool]:
        """Read the object as :func:`datastates.container.pickle_reader.survey` does."""
        if self.unreadable is not None:
            return Unbuilt(), False
        with naming(str(self.path)):
            return pickle_reader.survey(self._archive.read(PICKLE), resolve, trust=trust, with_torch=with_torch)

    def load(self, trust: Trust, into: Into) -> Any:
        """Build the object with its arrays, and verify them.

        Raises:
            TrustError: It needs a class that is not trusted.
            FormatError: It is damaged; the message names the file.
        """
        blocks: dict[str, Any] = {}  # tensors of one storage share it

        def array(stored: StoredArray) -> Any:
            record, name = stored.record, DATA + stored.record.encode()
            check_place(stored, self._archive.nbytes.get(name))
            if record not in blocks:
                data = self._archive.read(name)
                blocks[record] = into.allocate("torch", len(data))
                memory.assign(blocks[record], np.frombuffer(data, np.uint8).copy())
            ref = ArrayRef(record, "torch", stored.dtype, stored.shape, stored.stride)
            return memory.with_grad(into.view(blocks[record], ref, stored.begin), stored.requires_grad)

        with naming(str(self.path)):
            return pickle_reader.loads(self._archive.read(PICKLE), array, trust=trust, with_torch=into.with_torch)

    def check(self) -> None:
        """Raise FormatError if the stretch is no archive with a pickle, or the pickle is damaged."""
        pickle_reader.survey(self._archive.read(PICKLE), lambda stored: stored, trust="all", with_torch=False)

    def verify(self) -> None:
        """Read all records of the archive; raises FormatError if one does not match its checksum."""
        for name in self._archive.nbytes:
            self._archive.read(name)
