"""The way down: providers → planner → executor → container → manifest commit, for one snapshot."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from datastates import arrays, collector, container, frames, manifest, planner
from datastates.container import ProviderState
from datastates.dtypes import BY_NAME
from datastates.errors import DatastatesError, DeviceError, FormatError, ProviderError, TornSnapshotError
from datastates.executor import Columns, Executor, PreparedWrite, WriteJob, columns, prepare_write
from datastates.futures import Snapshot
from datastates.index import Index, StoredObject
from datastates.pickling import ArrayLeaf, StoredArray, is_dialect
from datastates.plan import I64, U8, WritePlan
from datastates.protocol import HOST, Buffer, Encoder, Shard, Shards, StateProvider, full_key, span, walk_unique
from datastates.shard_table import ShardTable, table_of


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What the providers described, apart from what changes between two snapshots of the same state.

    Attributes:
        names: The providers' names.
        layouts: What each provider gave as its layout; None from one that gives plain lists.
        arrays: Array shards, each with its provider's number.
        buffers: The distinct buffers that the arrays lie in.
        source: For each array shard, the number of its buffer.
        eager: For each buffer, whether it must be captured at once.
        witness: For each buffer, 1 where a lazy array lies in it.
        columns: The buffers as the executor wants them.
        nbytes: Bytes of all buffers.
        counted: Numbers of the lazy array shards whose changes torch counts.
        addresses: Where their first elements are.
    """

    names: tuple[str, ...]
    layouts: tuple[tuple[Shard, ...] | None, ...]
    arrays: list[tuple[int, Shard]]
    buffers: list[Buffer]
    source: list[int]
    eager: list[bool]
    witness: U8
    columns: Columns
    nbytes: int
    counted: I64
    addresses: I64

    def key(self, i: int) -> str:
        """The full key of an array shard."""
        provider, shard = self.arrays[i]
        return full_key(self.names[provider], shard.key)

    def plan_key(self) -> tuple[Any, ...]:
        """Equal for two structures that the same plan serves: all but where things are in memory."""
        rows = tuple(
            (p, s.key, s.kind, s.dtype, s.shape, s.stride, s.global_shape, s.offset, s.flat, s.buffer_offset)
            for p, s in self.arrays
        )
        return self.names, rows, tuple(self.source), tuple(self.eager), tuple(b.nbytes for b in self.buffers)


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What the providers described for one snapshot.

    Attributes:
        providers: The providers, in the caller's order.
        structure: The arrays; it may be that of an earlier snapshot.
        described: What each provider gave, which keeps the memory alive.
        sources: For each array shard, the live array.
        objects: Object shards, each with its provider's number.
    """

    providers: list[StateProvider]
    structure: Structure
    described: list[Sequence[Shard]]
    sources: list[object]
    objects: list[tuple[int, Shard]]


def collect(providers: Sequence[StateProvider], last: Structure | None = None) -> Collected:
    """Ask the providers for their shards, and check them; ``last`` is taken again where it still holds.

    Raises:
        TypeError, ValueError: Not providers, or two of one name.
        ProviderError: Two shards have the same key, or one does not lie in its buffer.
    """
    chosen = list(walk_unique(providers))
    described = [_shards_of(provider) for provider in chosen]
    sources: list[object] = []
    objects: list[tuple[int, Shard]] = []
    for p, shards in enumerate(described):
        if isinstance(shards, Shards):
            sources += shards.sources
            objects += [(p, shard) for shard in shards.objects]
        elif not all(isinstance(shard, Shard) for shard in shards):
            raise _no_list(chosen[p].name)
        else:
            sources += [shard.source for shard in shards if not shard.is_object]
            objects += [(p, shard) for shard in shards if shard.is_object]
    keys = {(p, shard.key) for p, shard in objects}
    if not all(isinstance(key, str) for _, key in keys):
        raise _no_list(chosen[next(p for p, key in keys if not isinstance(key, str))].name)
    if len(keys) < len(objects):
        p, key = next(k for k in keys if sum((p, s.key) == k for p, s in objects) > 1)
        raise ProviderError(f"two shards have the key {full_key(chosen[p].name, key)!r}")
    names = tuple(p.name for p in chosen)
    layouts = tuple(shards.layout if isinstance(shards, Shards) else None for shards in described)
    structure = last
    if last is None or names != last.names or None in layouts or not all(map(operator.is_, layouts, last.layouts)):
        structure = _structure(names, layouts, described, sources)
    assert structure is not None
    return Collected(chosen, structure, described, sources, objects)


@collector.paused()
def _structure(
    names: tuple[str, ...],
    layouts: tuple[tuple[Shard, ...] | None, ...],
    described: Sequence[Sequence[Shard]],
    sources: Sequence[object],
) -> Structure:
    """Check array shards and number their buffers."""
    rows: list[tuple[int, Shard]] = []
    buffers: list[Buffer] = []
    source: list[int] = []
    eager: list[bool] = []
    numbers: dict[tuple[object, ...], int] = {}
    seen: set[str] = set()
    for p, (shards, layout) in enumerate(zip(described, layouts, strict=True)):
        for shard in shards if layout is None else layout:
            if shard.is_object:
                continue
            if not isinstance(shard.key, str):
                raise _no_list(names[p])
            key = full_key(names[p], shard.key)
            if key in seen:
                raise ProviderError(f"two shards have the key {key!r}")
            seen.add(key)
            buffer = _checked_buffer(key, shard)
            place = (buffer.device, buffer.stream, buffer.pointer, buffer.nbytes, shard.dtype, shard.kind)
            if place not in numbers:
                numbers[place] = len(buffers)
                buffers.append(buffer)
                eager.append(False)
            rows.append((p, shard))
            source.append(numbers[place])
            eager[numbers[place]] |= not shard.lazy
    witness = np.zeros(len(buffers), np.uint8)
    witness[[number for (_, shard), number in zip(rows, source, strict=True) if shard.lazy]] = 1
    counted = [i for i, (_, shard) in enumerate(rows) if shard.lazy and arrays.has_version(sources[i])]
    _, addresses = arrays.witness([sources[i] for i in counted])
    nbytes = sum(b.nbytes for b in buffers)
    memory = columns(buffers)
    return Structure(
        names, layouts, rows, buffers, source, eager, witness, memory, nbytes, np.array(counted, np.int64), addresses
    )


def _shards_of(provider: StateProvider) -> Sequence[Shard]:
    try:
        shards = provider.shards()
    except ProviderError as error:
        raise ProviderError(f"{provider.name!r}: {error}") from error
    if not isinstance(shards, Sequence):
        raise _no_list(provider.name)
    return shards


def _no_list(name: str) -> ProviderError:
    return ProviderError(f"{name!r}: shards() must return a list of Shards with text for keys")


def _checked_buffer(key: str, shard: Shard) -> Buffer:
    if shard.dtype not in BY_NAME:
        raise ProviderError(f"{key!r} is of an unknown element type {shard.dtype!r}")
    itemsize = BY_NAME[shard.dtype].itemsize
    buffer = shard.buffer
    if buffer is None:
        raise ProviderError(f"{key!r} is an array without a buffer")
    if len(shard.shape) != len(shard.stride) or shard.buffer_offset < 0 or shard.buffer_offset % itemsize:
        raise ProviderError(f"{key!r} has strides that do not fit its shape, or an offset that does not fit its type")
    if shard.buffer_offset + span(shard.shape, shard.stride) * itemsize > buffer.nbytes:
        raise ProviderError(f"{key!r} reaches beyond its buffer of {buffer.nbytes} bytes")
    if min((*shard.shape, *shard.stride), default=0) < 0:
        raise ProviderError(f"{key!r} has a negative shape or stride")
    if (shard.offset is None) == (shard.flat is None):
        raise ProviderError(f"{key!r} must have either an offset (a box) or a flat range")
    return buffer


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """All that depends on the structure alone: kept from one snapshot to the next."""

    structure: Structure
    key: tuple[Any, ...]
    plan: WritePlan
    prepared: PreparedWrite
    table: ShardTable
    stored: dict[tuple[int, str], StoredArray]


class Saver:
    """Takes snapshots with one executor; keeps the plan of the last structure. Not thread-safe."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._last: _Plan | None = None

    def collect(self, providers: Sequence[StateProvider]) -> Collected:
        """What :func:`collect` gives, the structure of the last snapshot taken again where it still holds."""
        return collect(providers, self._last.structure if self._last else None)

    def begin(
        self, collected: Collected, snapshot: Snapshot, pending: manifest.Pending, retain: Callable[[], None]
    ) -> Running:
        """Start capturing; what returns is the rest, to be run in the background. Raises what fails at once.

        ``retain`` is called once the checkpoint is committed, before anybody is told: what it deletes is then gone.
        """
        eager_objects = [(p, s, None if s.lazy else _serialize(collected, p, s)) for p, s in collected.objects]
        structure = collected.structure
        planned = self._planned(structure)
        identity: dict[str, int | str] = {
            "step": snapshot.step,
            "rank": 0,
            "world_size": 1,
            "attempt": pending.directory.name[-8:],
        }
        versions = _Versions(collected)
        path = pending.directory / container_name(0)
        job = self._executor.submit_write(path, planned.prepared, structure.columns, structure.witness)
        work = Running(collected, snapshot, pending, planned, job, eager_objects, versions, identity, retain)
        snapshot.attach(work.gate, job.stats, job.timeline)
        return work

    def _planned(self, structure: Structure) -> _Plan:
        last, self._last = self._last, None
        if last is None or last.structure is not structure:
            key = structure.plan_key()
            if last is None or last.key != key:
                last = self._plan(structure, key)
            # the shards of plain lists hold the state: they are not kept
            kept = replace(structure, names=(), arrays=[], buffers=[]) if None in structure.layouts else structure
            last = replace(last, structure=kept)
        self._last = last
        return last

    def _plan(self, structure: Structure, key: tuple[Any, ...]) -> _Plan:
        sizes = np.array([b.nbytes for b in structure.buffers], np.uint64)
        eager = np.array(structure.eager, np.uint8)
        plan = planner.plan_write(sizes, eager, frames.header_nbytes(len(sizes)), self._executor.block)
        literal = frames.encode_frames(plan.header_offset, plan.data_offset, plan.source_nbytes[plan.order])
        record = np.argsort(plan.order)[structure.source].tolist() if structure.source else []
        try:
            table = table_of(structure.names, structure.arrays, record)
            table.check(plan.source_nbytes[plan.order])  # what a reader would refuse is not written
        except (FormatError, ValueError, OverflowError) as error:
            raise ProviderError(f"a shard is described wrongly: {error}") from error
        stored = {
            (p, shard.key): _stored(shard, number) for (p, shard), number in zip(structure.arrays, record, strict=True)
        }
        return _Plan(structure, key, plan, prepare_write(plan, literal), table, stored)


def _stored(shard: Shard, record: int) -> StoredArray:
    assert shard.dtype is not None
    assert shard.buffer is not None
    itemsize = BY_NAME[shard.dtype].itemsize
    return StoredArray(
        record=str(record),
        dtype=shard.dtype,
        offset=shard.buffer_offset // itemsize,
        shape=shard.shape,
        stride=shard.stride,
        elements=shard.buffer.nbytes // itemsize,
    )


def container_name(rank: int) -> str:
    """File name of a rank's container within a checkpoint."""
    return f"rank-{rank:05d}.pt"


def _serialize(collected: Collected, provider: int, shard: Shard) -> bytes | Encoder:
    owner = collected.providers[provider]
    result = owner.serialize(shard)
    if not (callable(result) or (isinstance(result, bytes) and is_dialect(result))):
        key = full_key(owner.name, shard.key)
        raise ProviderError(
            f"{key!r}: serialize() must return what datastates.dumps(value) gives, not other bytes or objects"
        )
    return result


class _Versions:
    """The free witness of D7: torch's version counters, compared once, before the gate lets anything change them."""

    def __init__(self, collected: Collected) -> None:
        self._structure = collected.structure
        counted = self._structure.counted
        every = len(counted) == len(collected.sources)
        self._tensors = list(collected.sources) if every else [collected.sources[i] for i in counted.tolist()]
        known = [s.versions for s in collected.described if isinstance(s, Shards)]
        if len(known) == len(collected.described):
            self._before = np.concatenate(known)[counted] if known else counted
        else:
            self._before, _ = arrays.witness(self._tensors)
        self._lock = threading.Lock()
        self._changed: list[str] | None = None

    def compare(self) -> list[str]:
        """Keys of the tensors that were changed in place until the first call of this."""
        with self._lock:
            if self._changed is None:
                versions, addresses = arrays.witness(self._tensors)
                changed = (versions != self._before) | (addresses != self._structure.addresses)
                self._changed = [self._structure.key(i) for i in self._structure.counted[changed].tolist()]
                self._tensors = []
            return self._changed


@dataclass(slots=True, eq=False)
class Running:
    """One snapshot after ``snapshot()`` has returned: serialize, wait, append the tail, commit."""

    collected: Collected
    snapshot: Snapshot
    pending: manifest.Pending
    planned: _Plan
    job: WriteJob
    objects: list[tuple[int, Shard, bytes | Encoder | None]]
    versions: _Versions
    identity: dict[str, int | str]
    retain: Callable[[], None]
    lazy_serialized: threading.Event = field(default_factory=threading.Event)
    devices: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = sorted(set(self.collected.structure.columns[1].tolist()) - {HOST})

    def gate(self) -> None:
        """Wait for what reads live state on the CPU; let the consumers' streams wait for the rest."""
        self.lazy_serialized.wait()
        self.versions.compare()
        try:
            self.job.gate(arrays.consumer_streams(self.devices))
        except DeviceError:
            # the device has failed: that is told by the snapshot, not by the optimizer that passes here
            with contextlib.suppress(DatastatesError):
                self.job.wait_captured()

    def run(self) -> None:
        """Do all the rest; a failure lands on the snapshot."""
        try:
            self._capture()
            tail, index_crc = self._write()
            self.job.finish(tail)
            nbytes = self.planned.plan.end + len(tail)
            self.snapshot.reach("persisted", file_nbytes=nbytes)
            entry = manifest.ContainerEntry(file=container_name(0), rank=0, nbytes=nbytes, index_crc32=index_crc)
            made = manifest.Manifest(
                step=self.snapshot.step,
                attempt=str(self.identity["attempt"]),
                created=manifest.now(),
                world_size=1,
                containers=(entry,),
            )
            with self.snapshot.stage("commit"):
                manifest.commit(self.pending, made)
            committed = time.monotonic()
            self.retain()
            self.snapshot.reach("committed", at=committed)
        except BaseException as error:  # on its way to whoever waits for the snapshot
            self.cancel(error)
        finally:
            self._release()
            self.snapshot.detach(self.job.stats(), self.job.timeline())

    def cancel(self, error: BaseException) -> None:
        """Stop at once, leave nothing behind, and let the snapshot fail."""
        self.lazy_serialized.set()
        self.job.abort()
        manifest.abandon(self.pending)
        self.snapshot.fail(error)

    def _capture(self) -> None:
        try:
            with self.snapshot.stage("serialize"):
                self.objects = [
                    (p, s, _serialize(self.collected, p, s) if data is None else data) for p, s, data in self.objects
                ]
        finally:
            self.lazy_serialized.set()
        self.job.wait_captured()
        changed = set(self.versions.compare())
        if torn := set(self.job.torn()):
            structure = self.collected.structure
            for i, source in enumerate(structure.source):
                if source in torn and structure.arrays[i][1].lazy:
                    changed.add(structure.key(i))
        if changed:
            raise TornSnapshotError(sorted(changed))
        self.snapshot.reach("captured")

    def _write(self) -> tuple[bytes, int]:
        """Encode the metadata while the data is being written; returns the tail and the index's checksum."""
        begin = frames.pickle_place(self.planned.plan.end)
        with self.snapshot.stage("serialize"):
            pickle, objects = container.encode_pickle(self._states(), begin)
        self._release()
        self.job.wait_written()
        with self.snapshot.stage("encode"):
            return container.encode_tail(self._index(pickle, objects, begin), pickle)

    def _index(self, pickle: bytes, objects: tuple[StoredObject, ...], begin: int) -> Index:
        plan = self.planned.plan
        crcs, chunk_crcs = self.job.checksums()
        return Index(
            identity=self.identity,
            header_offset=plan.header_offset,
            data_offset=plan.data_offset,
            record_nbytes=plan.source_nbytes[plan.order],
            record_crc=crcs[plan.order],
            chunk_crc=planner.reorder_chunks(chunk_crcs, plan),
            shards=self.planned.table,
            objects=objects,
            pickle_offset=begin,
            pickle_nbytes=len(pickle),
            pickle_crc=container.crc32(pickle),
        )

    def _states(self) -> list[ProviderState]:
        stored = self.planned.stored
        own: list[dict[str, bytes | StoredArray]] = [{} for _ in self.collected.providers]
        for (p, key), array in stored.items():
            own[p][key] = array
        states = []
        for number, provider in enumerate(self.collected.providers):

            def locate(leaf: ArrayLeaf, number: int = number) -> StoredArray:
                found = stored[number, leaf.key]
                return replace(found, requires_grad=True) if leaf.requires_grad else found

            encoded = {
                s.key: data if isinstance(data, bytes) else data(locate)  # type: ignore[misc]
                for p, s, data in self.objects
                if p == number
            }
            whole = encoded.get("")
            items = () if whole is not None else tuple({**own[number], **encoded}.items())
            states.append(ProviderState(provider.name, whole, items))
        return states

    def _release(self) -> None:
        """Let go of the state: nothing reads it any more."""
        collected, structure = self.collected, self.collected.structure
        for part in (collected.providers, collected.described, collected.sources, collected.objects):
            part.clear()
        if None in structure.layouts:  # then its shards hold the state, and it serves this snapshot only
            structure.arrays.clear()
            structure.buffers.clear()
        self.objects = []
