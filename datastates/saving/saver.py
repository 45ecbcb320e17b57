"""The way of one snapshot: providers → planner → executor → container → commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from datastates._base import gc_pause
from datastates._base.sizes import DESCRIPTOR_CRC
from datastates.commit.claims import claims_of
from datastates.commit.ending import Ending
from datastates.container import archive, nested_archives, zip_frames
from datastates.container.digests import plan_digests
from datastates.container.nested_archives import Nest
from datastates.container.records import Records
from datastates.container.table import table_of
from datastates.errors import FormatError, ProviderError
from datastates.executor.executor import Executor, prepare_write
from datastates.planning import write
from datastates.saving.collect import Collected, Structure, collect
from datastates.saving.running import Running, SavePlan, VersionWitness, _serialize
from datastates.saving.snapshot import Snapshot
from datastates.state.dtypes import BY_NAME
from datastates.state.provider import StateProvider
from datastates.state.repeated import Knowledge
from datastates.state.shards import Shard, StoredArray


class Saver:
    """Begins snapshots with one executor, and keeps the plan of the last structure. Not thread-safe."""

    def __init__(self, executor: Executor, rank: int, ranks: int, *, bare: bool = False, nested: bool = False) -> None:
        """Prepare for the containers of one rank.

        Args:
            executor: The executor.
            rank: The number of this rank.
            ranks: The number of ranks that save together.
            bare: Whether ``data.pkl`` is the value of the only provider, instead of a mapping of providers.
            nested: Whether each record is an archive of its own; see :mod:`datastates.container.nested_archives`.
                Arrays that share memory must then have the same shape and type.
        """
        self._executor = executor
        self._rank = rank
        self._ranks = ranks
        self._bare = bare
        self._nested = nested
        self._last: SavePlan | None = None
        self._knowledge = Knowledge()

    def collect(self, providers: Sequence[StateProvider]) -> Collected:
        """Call :func:`~datastates.saving.collect.collect` with the structure and the knowledge of the last snapshot."""
        last = self._last.structure if self._last else None
        return collect(providers, last, self._knowledge, rank=self._rank, ranks=self._ranks)

    def begin(self, collected: Collected, snapshot: Snapshot, ending: Ending) -> Running:
        """Start capturing; returns the rest of the work, to be run in the background. If it raises, it leaves no file.

        Args:
            collected: What the providers described.
            snapshot: The snapshot to report to.
            ending: Where the container is written, and how it is committed.
        """
        job = None
        try:
            eager_objects = [(p, s, None if s.lazy else _serialize(collected, p, s)) for p, s in collected.objects]
            structure = collected.structure
            planned = self._planned(structure)
            versions = VersionWitness(collected)
            job = self._executor.submit_write(ending.path, planned.prepared, structure.columns, structure.witness)
            work = Running(collected, snapshot, planned, job, eager_objects, versions, ending, self._bare)
            snapshot.attach(work.gate, job.stats, job.timeline)
        except BaseException:
            if job is not None:
                job.abort()
            ending.abandon(made=job is not None and job.made)
            raise
        return work

    @gc_pause.paused()
    def _planned(self, structure: Structure) -> SavePlan:
        last, self._last = self._last, None
        if last is None or last.structure is not structure:
            key = structure.plan_key()
            if last is None or last.key != key:
                last = self._plan(structure, key)
            last = replace(last, structure=structure.without_state())
        self._last = last
        return last

    def _plan(self, structure: Structure, key: tuple[Any, ...]) -> SavePlan:
        sizes = np.array([b.nbytes for b in structure.buffers], np.uint64)
        eager = np.array(structure.eager, np.uint8)
        order = write.file_order(sizes, eager)
        record = np.argsort(order)[structure.source].tolist() if structure.source else []
        nest = _nest(structure, record) if self._nested else None
        header_nbytes = nest.header_nbytes if nest else zip_frames.header_nbytes(len(sizes))
        crc_places = nested_archives.CRC_PLACES if nest else (DESCRIPTOR_CRC,)
        plan = write.plan_write(sizes, eager, header_nbytes, self._executor.block, crc_places)
        records = Records.of(plan)
        literal = archive.encode_framing(records, nest)
        try:
            table = table_of(structure.names, structure.arrays, record)
            table.check(records.nbytes)  # so that nothing is written that a reader would refuse
        except (FormatError, ValueError, OverflowError) as error:
            raise ProviderError(f"a shard is described wrongly: {error}") from error
        stored = {
            (p, shard.key): _stored(shard, number) for (p, shard), number in zip(structure.arrays, record, strict=True)
        }
        claims = claims_of(table) if self._ranks > 1 else None
        digests = plan_digests(table, records.nbytes, plan.order, np.zeros_like(plan.order))
        prepared = prepare_write(plan, literal, digests.runs)
        pickle_offset = archive.pickle_place(plan.end, nest)
        return SavePlan(structure, key, plan, records, prepared, table, claims, digests, stored, pickle_offset, nest)


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
