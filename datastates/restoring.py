"""The way up: manifest open → container → planner → executor → providers, and whole checkpoints without providers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from datastates import arrays, container, manifest, pickling, planner, unpickling
from datastates.errors import CorruptError, DatastatesError, FormatError, ProviderError, RestoreError, StorageError
from datastates.executor import Executor, read_bytes
from datastates.index import Index, StoredObject
from datastates.pickling import StoredArray
from datastates.plan import Chunks
from datastates.protocol import ArrayRef, Buffer, Saved, Shard, StateProvider, full_key, span, walk_unique
from datastates.shard_table import Row

Trust = Collection[str] | str
"""``"all"``, or the classes, as ``module.qualname``, that objects in a checkpoint may be of."""


class Restored(int):
    """The step that was restored, and with ``strict=False`` what was left as it was.

    Attributes:
        missing_keys: Keys that the state has and the checkpoint lacks.
        unexpected_keys: Keys that the checkpoint has and the state lacks.
        mismatched_keys: Keys whose shape, dtype or container type differs, each with the difference.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    mismatched_keys: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """One container file, opened: its index has been checked."""

    path: Path
    nbytes: int
    index: Index
    index_crc: int
    index_offset: int

    def name_record(self, record: int) -> str:
        """The keys that lie in a storage record, for an error about it."""
        table = self.index.shards
        keys = [table.row(i).key for i in np.flatnonzero(table.record == record)[:3].tolist()]
        return ", ".join(keys) or f"record {record}"

    def chunks(self) -> Chunks:
        """The checksummed chunks of its records."""
        return planner.plan_chunks(self.index.data_offset, self.index.record_nbytes, self.index.chunk_crc)

    def read_object(self, stored: StoredObject) -> bytes:
        """The opcodes of an object, verified; raises CorruptError."""
        data = read_bytes(self.path)(stored.offset, stored.nbytes)
        if container.crc32(data) != stored.crc:
            key = full_key(self.index.shards.providers[stored.provider], stored.key)
            raise CorruptError(f"{key!r} in {self.path} does not match its checksum", key=key, path=str(self.path))
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


def open_checkpoint(path: Path) -> tuple[manifest.Manifest, list[Container]]:
    """Open a checkpoint directory: its manifest, and every container that it names.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        FormatError: A file is not the one that the manifest names, or damaged.
    """
    opened = manifest.open(path)
    containers = []
    for entry in opened.containers:
        one = open_container(path / entry.file)
        identity = {"step": opened.step, "rank": entry.rank, "world_size": opened.world_size, "attempt": opened.attempt}
        if (one.nbytes, one.index_crc, one.index.identity) != (entry.nbytes, entry.index_crc32, identity):
            raise FormatError(f"{one.path} is not the container that the manifest names")
        containers.append(one)
    return opened, containers


def _only(path: Path, containers: list[Container]) -> Container:
    if len(containers) != 1:
        raise DatastatesError(f"{path} was written by {len(containers)} ranks, which this version cannot restore")
    return containers[0]


# --- reading arrays
# ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Reads:
    """Arrays of one container to be read: straight into memory where the layout allows, else by way of a copy."""

    source: Container
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    _seen: set[tuple[int, int, int, int]] = field(default_factory=set)

    def add(self, row: Row, array: Any) -> None:
        """Read a row into an array of the same shape and dtype."""
        place = arrays.place(array, row.stride)
        if place is None:
            landing = arrays.empty(reference(row))
            self.copies.append((array, landing))
            place = replace(arrays.memory(landing), nbytes=span(row.shape, row.stride) * row.dtype.itemsize)
        self.add_memory(int(self.source.index.data_offset[row.record]) + row.offset, place)

    def add_memory(self, offset: int, place: Buffer) -> None:
        """Read as many bytes as the memory has from an offset of the file."""
        same = (offset, place.nbytes, place.device, place.pointer)
        if same in self._seen:
            return  # tied tensors: the same bytes to the same memory
        self._seen.add(same)
        self.offsets.append(offset)
        self.lengths.append(place.nbytes)
        self.buffers.append(place)

    def conflict(self) -> int | None:
        """An offset whose bytes others would overwrite: live memory is shared that was not shared when saved."""
        order = sorted(range(len(self.buffers)), key=lambda i: (self.buffers[i].device, self.buffers[i].pointer))
        furthest: int | None = None
        for i in order:
            place = self.buffers[i]
            if furthest is not None and self.buffers[furthest].device == place.device:
                other = self.buffers[furthest]
                shared = place.pointer < other.pointer + other.nbytes and place.nbytes
                if shared and self.offsets[i] - place.pointer != self.offsets[furthest] - other.pointer:
                    return self.offsets[i]
                if place.pointer + place.nbytes <= other.pointer + other.nbytes:
                    continue
            furthest = i
        return None

    def run(self, executor: Executor) -> None:
        """Read and verify everything; then make the copies."""
        nbytes = np.array(self.lengths, np.uint64)
        plan = planner.plan_read(
            file_offset=np.array(self.offsets, np.uint64),
            nbytes=nbytes,
            dest=np.arange(len(nbytes), dtype=np.int32),
            dest_offset=np.zeros(len(nbytes), np.uint64),
            dest_nbytes=nbytes,
            chunks=self.source.chunks(),
            extent_nbytes=executor.block - 2 * 4096,
        )
        job = executor.submit_read(self.source.path, plan, self.buffers, self.source.name_record)
        job.wait()
        for array, landing in self.copies:
            arrays.assign(array, landing)


def reference(row: Row, *, key: str | None = None, requires_grad: bool = False) -> ArrayRef:
    """A row as providers see it."""
    return ArrayRef(row.key if key is None else key, row.kind, row.dtype.name, row.shape, row.stride, requires_grad)


# --- restoring into providers
# ------------------------------------------------------------------------------------------

_Place = tuple[str, int, str, tuple[int, ...], tuple[int, ...]]


def _place_of(row: Row) -> _Place:
    return str(row.record), row.offset // row.dtype.itemsize, row.dtype.name, row.shape, row.stride


def _place_in_pickle(stored: StoredArray) -> _Place:
    return stored.record, stored.offset, stored.dtype, stored.shape, stored.stride


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say in a plain FormatError what could not be decoded; its subclasses say so themselves."""
    try:
        yield
    except FormatError as error:
        if type(error) is not FormatError:
            raise
        raise FormatError(f"{what}: {error}") from error


class _Saved(Saved):
    """One provider's part of a container; collects what is reported about it."""

    def __init__(self, source: Container, provider: StateProvider, *, strict: bool, trust: Trust) -> None:
        self.strict = strict
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: dict[str, str] = {}
        self._source = source
        self._trust = trust
        self._name = provider.name
        table = source.index.shards
        self.rows = {table.keys[i]: table.row(i) for i in table.of_provider(provider.name)}
        self._objects = {o.key: o for o in source.index.objects if table.providers[o.provider] == provider.name}
        self._keys = {_place_of(row): key for key, row in self.rows.items()}
        self._streams: dict[str, bytes] = {}

    def arrays(self) -> Mapping[str, ArrayRef]:
        return {key: reference(row, key=key) for key, row in self.rows.items()}

    def objects(self) -> Sequence[str]:
        return list(self._objects)

    def report(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        self.missing += [full_key(self._name, key) for key in missing]
        self.unexpected += [full_key(self._name, key) for key in unexpected]
        self.mismatched.update({full_key(self._name, key): what for key, what in (mismatched or {}).items()})

    def structure(self, key: str) -> object:
        with self._named(key):
            return unpickling.structure(self._stream(key), self._reference, trust=self._trust)

    def build(self, key: str, targets: Mapping[_Place, object]) -> object:
        """Decode an object over the arrays that have been restored; what was not stays a reference."""

        def resolve(stored: StoredArray) -> object:
            found = targets.get(_place_in_pickle(stored))
            return self._reference(stored) if found is None else found

        with self._named(key):
            return unpickling.loads(self._stream(key), resolve, trust=self._trust)

    def _stream(self, key: str) -> bytes:
        if key not in self._streams:
            self._streams[key] = pickling.stream(self._source.read_object(self._objects[key]))
        return self._streams[key]

    def _reference(self, stored: StoredArray) -> ArrayRef:
        key = self._keys.get(_place_in_pickle(stored))
        if key is None:
            raise FormatError(f"an array of record {stored.record!r} that the index does not list")
        return reference(self.rows[key], key=key, requires_grad=stored.requires_grad)

    def _named(self, key: str) -> contextlib.AbstractContextManager[None]:
        return _naming(f"{full_key(self._name, key)!r} in {self._source.path}")

    def compare(self, shards: Sequence[Shard]) -> list[tuple[Row, Shard]]:
        """The array shards that can be restored, with their rows; the others are reported."""
        fitting = []
        for shard in shards:
            if shard.key not in (self._objects if shard.is_object else self.rows):
                raise ProviderError(f"destinations() gave {shard.key!r}, which the checkpoint does not hold")
            if shard.is_object:
                continue
            row = self.rows[shard.key]
            stored, wanted = (row.dtype.name, row.shape), (shard.dtype, shard.shape)
            if stored != wanted:
                texts = [f"{dtype} of shape {shape}" for dtype, shape in (stored, wanted)]
                self.report(mismatched={shard.key: f"{texts[0]} in the checkpoint, {texts[1]} in the live state"})
            elif not arrays.is_writable(shard.source):
                self.report(mismatched={shard.key: "the live array is read-only"})
            else:
                fitting.append((row, shard))
        return fitting


def restore(
    path: Path, providers: Sequence[StateProvider], executor: Callable[[int], Executor], *, strict: bool, trust: Trust
) -> Restored:
    """Restore one checkpoint directory into providers, in place; everything is compared before anything is changed.

    ``executor`` gives the executor to use, told how many bytes will be read.
    """
    opened, containers = open_checkpoint(path)
    source = _only(path, containers)
    known = {provider: _Saved(source, provider, strict=strict, trust=trust) for provider in walk_unique(providers)}
    reads = _Reads(source)
    objects: list[tuple[StateProvider, Shard, Callable[[], object]]] = []
    for provider, saved in known.items():
        if provider.name not in source.index.shards.providers:
            saved.report(missing=[""])
            continue
        shards = provider.destinations(saved)
        targets: dict[_Place, object] = {}
        for row, shard in saved.compare(shards):
            reads.add(row, shard.source)
            targets[_place_of(row)] = shard.source
        for shard in shards:
            if shard.is_object:
                saved.structure(shard.key)  # what is not trusted or damaged is refused before anything is changed
                objects.append((provider, shard, partial(saved.build, shard.key, targets)))
    result = _left_over(opened.step, known.values())
    if strict and (result.missing_keys or result.unexpected_keys or result.mismatched_keys):
        raise RestoreError(
            f"{path} does not fit the live state: {_sentence(result)}",
            missing=result.missing_keys,
            unexpected=result.unexpected_keys,
            mismatched=[f"{key}: {what}" for key, what in result.mismatched_keys.items()],
        )
    if (offset := reads.conflict()) is not None:
        keys = source.name_record(int(np.searchsorted(source.index.data_offset, offset, side="right")) - 1)
        raise RestoreError(
            f"{path} does not fit the live state: {keys} shares live memory with a tensor that was saved apart from it",
            mismatched=[keys],
        )
    reads.run(executor(sum(reads.lengths)))
    for provider, shard, build in objects:
        provider.restore(shard, build())
    return result


def _left_over(step: int, saved: Collection[_Saved]) -> Restored:
    result = Restored(step)
    result.missing_keys = [key for s in saved for key in s.missing]
    result.unexpected_keys = [key for s in saved for key in s.unexpected]
    result.mismatched_keys = {key: what for s in saved for key, what in s.mismatched.items()}
    return result


def _sentence(result: Restored) -> str:
    def shown(keys: Sequence[str]) -> str:
        return ", ".join(map(repr, keys[:8])) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")

    parts = []
    if result.missing_keys:
        parts.append(f"the checkpoint lacks {shown(result.missing_keys)}")
    if result.unexpected_keys:
        parts.append(f"the live state lacks {shown(result.unexpected_keys)}")
    parts += [f"{key!r}: {what}" for key, what in list(result.mismatched_keys.items())[:8]]
    return "; ".join(parts)


# --- loading without providers
# -----------------------------------------------------------------------------------------


def load(path: Path, executor: Callable[[int], Executor], *, trust: Trust) -> dict[str, Any]:
    """Read a checkpoint directory, or one container file, as nested host arrays and objects."""
    source = open_container(path) if path.is_file() else _only(path, open_checkpoint(manifest.find(path))[1])
    data = _read_pickle(source)
    with _naming(str(source.path)):
        value = unpickling.structure(data, lambda stored: stored, trust=trust)
        if not isinstance(value, dict):
            raise FormatError(f"data.pkl holds a {type(value).__name__}, not a mapping of providers")
        made = _read_records(source, executor)

        def resolve(stored: StoredArray) -> object:
            if _place_in_pickle(stored) not in made:
                raise FormatError(f"an array of record {stored.record!r} that the index does not list")
            return arrays.with_grad(made[_place_in_pickle(stored)], stored.requires_grad)

        result: dict[str, Any] = unpickling.loads(data, resolve, trust=trust)
        return result


def _read_records(source: Container, executor: Callable[[int], Executor]) -> dict[_Place, Any]:
    """Read every storage record into fresh host memory, and make the arrays that lie in it, sharing it."""
    index = source.index
    rows = list(map(index.shards.row, range(len(index.shards))))
    kinds = {row.record: row.kind for row in rows if row.kind != "torch"}
    kinds |= {row.record: row.kind for row in rows if row.kind == "torch"}  # a torch block has views of both kinds
    reads = _Reads(source)
    blocks = [arrays.allocate(kinds.get(r, "numpy"), n) for r, n in enumerate(index.record_nbytes.tolist())]
    for block, offset in zip(blocks, index.data_offset.tolist(), strict=True):
        reads.add_memory(offset, arrays.memory(block))
    reads.run(executor(sum(reads.lengths)))
    return {_place_of(row): arrays.view(blocks[row.record], reference(row), row.offset) for row in rows}


def _read_pickle(source: Container) -> bytes:
    """The whole of ``data.pkl``, verified; raises CorruptError that names the object, if it is one, that is damaged."""
    index = source.index
    data = read_bytes(source.path)(index.pickle_offset, index.pickle_nbytes)
    if container.crc32(data) != index.pickle_crc:
        for stored in index.objects:
            source.read_object(stored)
        raise CorruptError(
            f"data.pkl in {source.path} does not match its checksum", key="data.pkl", path=str(source.path)
        )
    return data
