"""The way down: providers → planner → executor → container → manifest commit, for one snapshot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from datastates import arrays, collector, container, frames, nested, planner
from datastates.claims import Claims, claims_of, whole_claims
from datastates.collecting import Collected, Structure, collect
from datastates.committing import Vote
from datastates.container import ProviderState
from datastates.describing import Knowledge
from datastates.digests import DigestPlan, plan_digests
from datastates.dtypes import BY_NAME
from datastates.ending import Ending
from datastates.errors import DatastatesError, DeviceError, FormatError, ProviderError, TornSnapshotError
from datastates.executor import Executor, PreparedWrite, WriteJob, prepare_write
from datastates.futures import Snapshot
from datastates.index import Index, StoredObject
from datastates.nested import Nest
from datastates.pickling import ArrayLeaf, StoredArray, is_dialect
from datastates.plan import DESCRIPTOR_CRC, WritePlan
from datastates.protocol import Encoder, Shard, Shards, StateProvider, full_key
from datastates.shard_table import Row, ShardTable, table_of


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """All that depends on the structure alone: kept from one snapshot to the next."""

    structure: Structure
    key: tuple[Any, ...]
    plan: WritePlan
    prepared: PreparedWrite
    table: ShardTable
    claims: Claims | None
    digests: DigestPlan
    stored: dict[tuple[int, str], StoredArray]
    pickle_offset: int
    nest: Nest | None

    def places(self) -> Iterator[tuple[Row, tuple[int, int], tuple[int, int]]]:
        """For each array where its data lies in the file, and where the archive around it: offset and bytes."""
        assert self.nest is not None
        data = zip(self.plan.data_offset.tolist(), self.plan.source_nbytes[self.plan.order].tolist(), strict=True)
        archives = zip(*(x.tolist() for x in self.nest.places(self.plan.header_offset, self.plan.end)), strict=True)
        records = list(zip(data, archives, strict=True))
        return ((row, *records[row.record]) for row in self.table.rows(range(len(self.table))))


class Saver:
    """Takes snapshots with one executor; keeps the plan of the last structure. Not thread-safe."""

    def __init__(self, executor: Executor, rank: int, ranks: int, *, bare: bool = False, nested: bool = False) -> None:
        """Make one for this rank.

        ``bare``: ``data.pkl`` is the value of the one provider, not a mapping of providers. ``nested``: each record is
        an archive by itself, see :mod:`datastates.nested`; arrays that share memory then are alike.
        """
        self._executor = executor
        self._rank = rank
        self._ranks = ranks
        self._bare = bare
        self._nested = nested
        self._last: _Plan | None = None
        self._knowledge = Knowledge()

    def collect(self, providers: Sequence[StateProvider]) -> Collected:
        """What :func:`collect` gives; what is known from the last snapshot is taken again where it still holds."""
        last = self._last.structure if self._last else None
        return collect(providers, last, self._knowledge, rank=self._rank, ranks=self._ranks)

    def begin(self, collected: Collected, snapshot: Snapshot, ending: Ending) -> Running:
        """Start capturing; what returns is the rest, to be run in the background.

        Raises what fails at once; then nothing is left behind.
        """
        job = None
        try:
            eager_objects = [(p, s, None if s.lazy else _serialize(collected, p, s)) for p, s in collected.objects]
            structure = collected.structure
            planned = self._planned(structure)
            versions = _Versions(collected)
            job = self._executor.submit_write(ending.path, planned.prepared, structure.columns, structure.witness)
            work = Running(collected, snapshot, planned, job, eager_objects, versions, ending, self._bare)
            snapshot.attach(work.gate, job.stats, job.timeline)
        except BaseException:
            if job is not None:
                job.abort()
            ending.abandon(made=job is not None and job.made)
            raise
        return work

    @collector.paused()
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
        order = planner.file_order(sizes, eager)
        record = np.argsort(order)[structure.source].tolist() if structure.source else []
        nest = _nest(structure, record) if self._nested else None
        header_nbytes = nest.header_nbytes if nest else frames.header_nbytes(len(sizes))
        crc_places = nested.CRC_PLACES if nest else (DESCRIPTOR_CRC,)
        plan = planner.plan_write(sizes, eager, header_nbytes, self._executor.block, crc_places)
        record_nbytes = plan.source_nbytes[order]
        literal = container.encode_framing(plan.header_offset, plan.data_offset, record_nbytes, nest=nest)
        try:
            table = table_of(structure.names, structure.arrays, record)
            table.check(record_nbytes)  # what a reader would refuse is not written
        except (FormatError, ValueError, OverflowError) as error:
            raise ProviderError(f"a shard is described wrongly: {error}") from error
        stored = {
            (p, shard.key): _stored(shard, number) for (p, shard), number in zip(structure.arrays, record, strict=True)
        }
        claims = claims_of(table) if self._ranks > 1 else None
        digests = plan_digests(table, record_nbytes, plan.order, np.zeros_like(plan.order))
        prepared = prepare_write(plan, literal, digests.runs)
        pickle_offset = container.pickle_place(plan.end, nest)
        return _Plan(structure, key, plan, prepared, table, claims, digests, stored, pickle_offset, nest)


def _nest(structure: Structure, record: Sequence[int]) -> Nest:
    arrays: dict[int, StoredArray] = {}
    for i, (_, shard) in enumerate(structure.arrays):
        stored = _stored(shard, record[i])
        if arrays.setdefault(record[i], stored) != stored:
            raise ProviderError(f"{structure.key(i)!r} shares memory with an array of another shape or type")
    return Nest([arrays[i] for i in range(len(arrays))])


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


def _serialize(collected: Collected, provider: int, shard: Shard) -> bytes | Encoder:
    result = collected.providers[provider].serialize(shard)
    if not (callable(result) or (isinstance(result, bytes) and is_dialect(result))):
        key = full_key(collected.structure.names[provider], shard.key)
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

    def forget(self) -> None:
        """Let go of the tensors of a snapshot that has failed: nobody asks what has changed."""
        with self._lock:
            self._tensors, self._changed = [], []


@dataclass(slots=True, eq=False)
class Running:
    """One snapshot after ``snapshot()`` has returned: serialize, wait, append the tail, commit."""

    collected: Collected
    snapshot: Snapshot
    planned: _Plan
    job: WriteJob
    objects: list[tuple[int, Shard, bytes | Encoder | None]]
    versions: _Versions
    ending: Ending
    bare: bool
    lazy_serialized: threading.Event = field(default_factory=threading.Event)

    def gate(self) -> None:
        """Wait for what reads live state on the CPU; let the consumers' streams wait for the rest.

        What fails here fails the snapshot, once nothing is read any more, and not the update that passes.
        """
        try:
            self._pass()
        except Exception as error:
            self.job.abort()
            self.snapshot.fail(error)

    def _pass(self) -> None:
        self.lazy_serialized.wait()
        self.versions.compare()
        try:
            self.job.gate(arrays.consumer_streams(self.collected.structure.devices))
        except DeviceError:
            # the device has failed: that is told by the snapshot, not by the optimizer that passes here
            with contextlib.suppress(DatastatesError):
                self.job.wait_captured()

    def run(self) -> BaseException | None:
        """Do all the rest; a failure lands on the snapshot, and is returned: the other ranks are to be told."""
        try:
            self._capture()
            tail, vote = self._write()
            self.job.finish(tail)
            self.snapshot.reach("persisted", file_nbytes=vote.nbytes)
            with self.snapshot.stage("commit"):
                self.snapshot.path = self.ending.commit(vote)
            self.snapshot.reach("committed", at=self.ending.committed)
        except BaseException as error:  # on its way to whoever waits for the snapshot
            self.cancel(error)
            return error
        self._let_go()
        return None

    def cancel(self, error: BaseException) -> None:
        """Stop at once, leave nothing behind, and let the snapshot fail."""
        self.lazy_serialized.set()
        self.job.abort()
        self.ending.abandon(made=self.job.made)
        self.versions.forget()
        self._let_go()
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
                # what was copied at once is torn only where all of its memory was without a witness, and was not there
                if source in torn and (structure.arrays[i][1].lazy or not structure.witness[source]):
                    changed.add(structure.key(i))
        if changed:
            raise TornSnapshotError(sorted(changed))
        self.snapshot.reach("captured")

    def _write(self) -> tuple[bytes, Vote]:
        """Encode the metadata while the data is being written; returns the tail, and what to say of the container."""
        begin = self.planned.pickle_offset
        with self.snapshot.stage("serialize"):
            pickle, objects = container.encode_pickle(self._states(), begin, bare=self.bare)
        self._release()
        self.job.wait_checksummed()
        with self.snapshot.stage("encode"):
            index = self._index(pickle, objects, begin)
            tail, index_crc = container.encode_tail(index, pickle, self.planned.nest)
        return tail, Vote(
            step=self.snapshot.step,
            file=self.ending.path.name,
            nbytes=self.planned.plan.end + len(tail),
            index_crc32=index_crc,
            claims=self.planned.claims and whole_claims(self.planned.claims, index),
        )

    def _index(self, pickle: bytes, objects: tuple[StoredObject, ...], begin: int) -> Index:
        plan = self.planned.plan
        crcs, chunk_crcs = self.job.checksums()
        return Index(
            identity=self.ending.identity,
            header_offset=plan.header_offset,
            data_offset=plan.data_offset,
            record_nbytes=plan.source_nbytes[plan.order],
            record_crc=crcs[plan.order],
            chunk_crc=planner.reorder_chunks(chunk_crcs, plan),
            shards=self.planned.digests.filled(crcs[plan.order], self.job.digests(), self.planned.table),
            objects=objects,
            pickle_offset=begin,
            pickle_nbytes=len(pickle),
            pickle_crc=container.crc32(pickle),
            nested=self.planned.nest is not None,
        )

    def _states(self) -> list[ProviderState]:
        stored = self.planned.stored
        own: list[dict[str, bytes | StoredArray]] = [{} for _ in self.collected.providers]
        for (p, key), array in stored.items():
            own[p][key] = array
        states = []
        for number, name in enumerate(self.collected.structure.names):

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
            states.append(ProviderState(name, whole, items))
        return states

    def _let_go(self) -> None:
        self._release()
        self.snapshot.detach(self.job.stats(), self.job.timeline())

    def _release(self) -> None:
        """Let go of the state: nothing reads it any more."""
        collected, structure = self.collected, self.collected.structure
        for part in (collected.providers, collected.described, collected.sources, collected.memory, collected.objects):
            part.clear()
        if None in structure.layouts:  # then its shards hold the state, and it serves this snapshot only
            structure.arrays.clear()
            structure.buffers.clear()
        self.objects = []
