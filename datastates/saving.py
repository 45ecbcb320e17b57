"""The way down: providers → planner → executor → container → manifest commit, for one snapshot."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from datastates import arrays, container, frames, manifest, planner
from datastates.container import ProviderState
from datastates.dtypes import BY_NAME
from datastates.errors import DatastatesError, DeviceError, FormatError, ProviderError, TornSnapshotError
from datastates.executor import Executor, PreparedWrite, WriteJob, prepare_write
from datastates.futures import Snapshot
from datastates.index import Index
from datastates.pickling import ArrayLeaf, StoredArray, is_dialect
from datastates.plan import WritePlan
from datastates.protocol import HOST, Buffer, Encoder, Shard, StateProvider, full_key, span, walk_unique
from datastates.shard_table import ShardTable, table_of


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What the providers described.

    Attributes:
        providers: The providers, in the caller's order.
        arrays: Array shards, each with its provider's number.
        objects: Object shards, likewise.
        buffers: The distinct buffers that the arrays lie in.
        source: For each array shard, the number of its buffer.
        eager: For each buffer, whether it must be captured at once.
    """

    providers: list[StateProvider]
    arrays: list[tuple[int, Shard]]
    objects: list[tuple[int, Shard]]
    buffers: list[Buffer]
    source: list[int]
    eager: list[bool]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in self.buffers)

    def structure(self) -> tuple[Any, ...]:
        """Equal for two snapshots that the same plan serves."""
        rows = tuple(
            (p, s.key, s.kind, s.dtype, s.shape, s.stride, s.global_shape, s.offset, s.flat, s.buffer_offset)
            for p, s in self.arrays
        )
        names = tuple(p.name for p in self.providers)
        return names, rows, tuple(self.source), tuple(self.eager), tuple(b.nbytes for b in self.buffers)


def collect(providers: Sequence[StateProvider]) -> Collected:
    """Ask the providers for their shards, and check them.

    Raises:
        TypeError, ValueError: Not providers, or two of one name.
        ProviderError: Two shards have the same key, or one does not lie in its buffer.
    """
    result = Collected(list(walk_unique(providers)), [], [], [], [], [])
    numbers: dict[tuple[object, ...], int] = {}
    seen: set[tuple[str, bool]] = set()
    for p, provider in enumerate(result.providers):
        for shard in _shards_of(provider):
            key = full_key(provider.name, shard.key)
            if (key, shard.is_object) in seen:
                raise ProviderError(f"two shards have the key {key!r}")
            seen.add((key, shard.is_object))
            if shard.dtype is None:
                result.objects.append((p, shard))
                continue
            buffer = _checked_buffer(key, shard)
            place = (buffer.device, buffer.stream, buffer.pointer, buffer.nbytes, shard.dtype, shard.kind)
            if place not in numbers:
                numbers[place] = len(result.buffers)
                result.buffers.append(buffer)
                result.eager.append(False)
            result.arrays.append((p, shard))
            result.source.append(numbers[place])
            result.eager[numbers[place]] |= not shard.lazy
    return result


def _shards_of(provider: StateProvider) -> Sequence[Shard]:
    try:
        shards = provider.shards()
    except ProviderError as error:
        raise ProviderError(f"{provider.name!r}: {error}") from error
    if not isinstance(shards, Sequence) or not all(isinstance(s, Shard) and isinstance(s.key, str) for s in shards):
        raise ProviderError(f"{provider.name!r}: shards() must return a list of Shards with text for keys")
    return shards


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

    structure: tuple[Any, ...]
    plan: WritePlan
    prepared: PreparedWrite
    table: ShardTable
    record: list[int]


class Saver:
    """Takes snapshots with one executor; keeps the plan of the last structure. Not thread-safe."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._last: _Plan | None = None

    def begin(
        self, collected: Collected, snapshot: Snapshot, pending: manifest.Pending, retain: Callable[[], None]
    ) -> Running:
        """Start capturing; what returns is the rest, to be run in the background. Raises what fails at once.

        ``retain`` is called once the checkpoint is committed, before anybody is told: what it deletes is then gone.
        """
        eager_objects = [(p, s, None if s.lazy else _serialize(collected, p, s)) for p, s in collected.objects]
        planned = self._planned(collected)
        witness = [False] * len(collected.buffers)
        for (_, shard), source in zip(collected.arrays, collected.source, strict=True):
            witness[source] = witness[source] or shard.lazy
        identity: dict[str, int | str] = {
            "step": snapshot.step,
            "rank": 0,
            "world_size": 1,
            "attempt": pending.directory.name[-8:],
        }
        versions = _Versions(collected)
        path = pending.directory / container_name(0)
        job = self._executor.submit_write(path, planned.prepared, collected.buffers, witness)
        work = Running(collected, snapshot, pending, planned, job, eager_objects, versions, identity, retain)
        snapshot.attach(work.gate, job.stats)
        return work

    def _planned(self, collected: Collected) -> _Plan:
        structure = collected.structure()
        if self._last is None or self._last.structure != structure:
            self._last = None
            sizes = np.array([b.nbytes for b in collected.buffers], np.uint64)
            eager = np.array(collected.eager, np.uint8)
            plan = planner.plan_write(sizes, eager, frames.header_nbytes(len(sizes)), self._executor.block)
            literal = frames.encode_frames(plan.header_offset, plan.data_offset, plan.source_nbytes[plan.order])
            record_of_source = np.argsort(plan.order)
            record = [int(record_of_source[s]) for s in collected.source]
            try:
                table = table_of([p.name for p in collected.providers], collected.arrays, record)
                table.check(plan.source_nbytes[plan.order])  # what a reader would refuse is not written
            except (FormatError, ValueError, OverflowError) as error:
                raise ProviderError(f"a shard is described wrongly: {error}") from error
            self._last = _Plan(structure, plan, prepare_write(plan, literal), table, record)
        return self._last


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
        lazy = [(full_key(collected.providers[p].name, s.key), s.source) for p, s in collected.arrays if s.lazy]
        self._watched = [(key, a, v) for key, a in lazy if (v := arrays.version(a)) is not None]
        self._lock = threading.Lock()
        self._changed: list[str] | None = None

    def compare(self) -> list[str]:
        """Keys of the tensors that were changed in place until the first call of this."""
        with self._lock:
            if self._changed is None:
                self._changed = [key for key, array, before in self._watched if arrays.version(array) != before]
                self._watched = []
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
        self.devices = sorted({b.device for b in self.collected.buffers if b.device != HOST})

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
            manifest.commit(
                self.pending,
                manifest.Manifest(
                    step=self.snapshot.step,
                    attempt=str(self.identity["attempt"]),
                    created=manifest.now(),
                    world_size=1,
                    containers=(entry,),
                ),
            )
            committed = time.monotonic()
            self.retain()
            self.snapshot.reach("committed", at=committed)
        except BaseException as error:  # on its way to whoever waits for the snapshot
            self.cancel(error)
        finally:
            self._release()
            self.snapshot.detach(self.job.stats())

    def cancel(self, error: BaseException) -> None:
        """Stop at once, leave nothing behind, and let the snapshot fail."""
        self.lazy_serialized.set()
        self.job.abort()
        manifest.abandon(self.pending)
        self.snapshot.fail(error)

    def _capture(self) -> None:
        try:
            self.objects = [
                (p, s, _serialize(self.collected, p, s) if data is None else data) for p, s, data in self.objects
            ]
        finally:
            self.lazy_serialized.set()
        self.job.wait_captured()
        changed = set(self.versions.compare())
        torn = set(self.job.torn())
        for (p, shard), source in zip(self.collected.arrays, self.collected.source, strict=True):
            if source in torn and shard.lazy:
                changed.add(full_key(self.collected.providers[p].name, shard.key))
        if changed:
            raise TornSnapshotError(sorted(changed))
        self.snapshot.reach("captured")

    def _write(self) -> tuple[bytes, int]:
        """Encode the metadata while the data is being written; returns the tail and the index's checksum."""
        begin = frames.pickle_place(self.planned.plan.end)
        pickle, objects = container.encode_pickle(self._states(), begin)
        self._release()
        self.job.wait_written()
        plan = self.planned.plan
        crcs, chunk_crcs = self.job.checksums()
        index = Index(
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
        return container.encode_tail(index, pickle)

    def _states(self) -> list[ProviderState]:
        stored = {
            (p, shard.key): self._stored(shard, record)
            for (p, shard), record in zip(self.collected.arrays, self.planned.record, strict=True)
        }
        states = []
        for number, provider in enumerate(self.collected.providers):

            def locate(leaf: ArrayLeaf, number: int = number) -> StoredArray:
                return replace(stored[number, leaf.key], requires_grad=leaf.requires_grad)

            encoded = {
                s.key: data if isinstance(data, bytes) else data(locate)  # type: ignore[misc]
                for p, s, data in self.objects
                if p == number
            }
            own: dict[str, bytes | StoredArray] = {k: a for (p, k), a in stored.items() if p == number}
            whole = encoded.get("")
            items = () if whole is not None else tuple({**own, **encoded}.items())
            states.append(ProviderState(provider.name, whole, items))
        return states

    def _stored(self, shard: Shard, record: int) -> StoredArray:
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

    def _release(self) -> None:
        """Let go of the state: nothing reads it any more."""
        for part in (self.collected.providers, self.collected.arrays, self.collected.objects, self.collected.buffers):
            part.clear()
        self.objects = []
