"""Containers as a format of files: records in the order of the plan, then ``data.pkl`` and the index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from datastates._base.sizes import DESCRIPTOR_CRC
from datastates.commit.claims import Claims, claims_of, whole_claims
from datastates.commit.ending import Identity
from datastates.container import archive, checksums, data_pkl, nested_archives, zip_frames
from datastates.container.data_pkl import ProviderState
from datastates.container.digests import DigestPlan, plan_digests
from datastates.container.index import Hashes, Index, StoredObject
from datastates.container.nested_archives import Nest
from datastates.container.records import Records
from datastates.container.table import Row, ShardTable, table_of
from datastates.errors import FormatError, ProviderError
from datastates.executor.executor import PreparedWrite, prepare_write
from datastates.planning import write
from datastates.planning.plans import WritePlan
from datastates.saving.frame import Checksums, Objects, Tail
from datastates.saving.structure import Structure
from datastates.state.shards import ArrayLeaf, Shard, StoredArray


@dataclass(frozen=True, slots=True)
class ContainerFraming:
    """Plans containers, one for each structure. See :class:`~datastates.saving.frame.Framing`.

    Attributes:
        claims: Whether it is one of several containers of a checkpoint, so that its parts are claimed.
        bare: Whether ``data.pkl`` is the value of the only provider, instead of a mapping of providers.
        nested: Whether each record is an archive of its own; see :mod:`datastates.container.nested_archives`.
            Arrays that share memory must then have the same shape and type.
    """

    claims: bool = False
    bare: bool = False
    nested: bool = False

    def plan(self, structure: Structure, block: int) -> tuple[ContainerFrame, PreparedWrite]:
        """Plan a container; raises ProviderError where a shard is described wrongly."""
        sizes = np.array([b.nbytes for b in structure.buffers], np.uint64)
        eager = np.array(structure.eager, np.uint8)
        order = write.file_order(sizes, eager)
        record = np.argsort(order)[structure.source].tolist() if structure.source else []
        nest = _nest(structure, record) if self.nested else None
        header_nbytes = nest.header_nbytes if nest else zip_frames.header_nbytes(len(sizes))
        crc_places = nested_archives.CRC_PLACES if nest else (DESCRIPTOR_CRC,)
        plan = write.plan_write(sizes, eager, header_nbytes, block, crc_places)
        records = Records.of(plan)
        literal = archive.encode_framing(records, nest)
        try:
            table = table_of(structure.names, structure.arrays, record)
            table.check(records.nbytes)  # refuse now what a reader would refuse later
        except (FormatError, ValueError, OverflowError) as error:
            raise ProviderError(f"a shard is described wrongly: {error}") from error
        stored: list[dict[str, StoredArray]] = [{} for _ in structure.names]
        for (p, shard), number in zip(structure.arrays, record, strict=True):
            stored[p].setdefault(shard.key, _stored(shard, number))  # data.pkl has the first of several parts
        claims = claims_of(table) if self.claims else None
        digests = plan_digests(table, records.nbytes, plan.order, np.zeros_like(plan.order))
        prepared = prepare_write(plan, literal, digests.runs)
        pickle_offset = archive.pickle_place(plan.end, nest)
        return ContainerFrame(plan, records, table, claims, digests, stored, pickle_offset, nest, self.bare), prepared


@dataclass(frozen=True, slots=True, eq=False)
class ContainerFrame:
    """Plans and encodes the bytes of a container besides the arrays'. See :class:`~datastates.saving.frame.Frame`."""

    plan: WritePlan
    records: Records
    table: ShardTable
    claims: Claims | None
    digests: DigestPlan
    stored: list[dict[str, StoredArray]]
    """For each provider, the places of its arrays in the container, by key."""
    pickle_offset: int
    nest: Nest | None
    bare: bool

    def places(self) -> Iterator[tuple[Row, tuple[int, int], tuple[int, int]]]:
        """For each array, its row, then offset and length in the file of its data, and of the archive around the data.

        For nested archives only.
        """
        assert self.nest is not None
        data = zip(self.records.data_offset.tolist(), self.records.nbytes.tolist(), strict=True)
        archives = zip(*(x.tolist() for x in self.nest.places(self.records)), strict=True)
        records = list(zip(data, archives, strict=True))
        return ((row, *records[row.record]) for row in self.table.rows(range(len(self.table))))

    def encode_objects(self, objects: Objects) -> Callable[[Checksums, Identity, Hashes | None], Tail]:
        """Encode ``data.pkl``; the returned function then encodes the index."""
        pickle, stored = data_pkl.encode_pickle(self._states(objects), self.pickle_offset, bare=self.bare)

        def encode_tail(sums: Checksums, identity: Identity, hashes: Hashes | None) -> Tail:
            index = replace(self._index(sums, identity, pickle, stored), hashes=hashes)
            tail, index_crc = archive.encode_tail(index, pickle, self.nest)
            return Tail(tail, index_crc, self.claims and whole_claims(self.claims, index), index)

        return encode_tail

    def _index(self, sums: Checksums, identity: Identity, pickle: bytes, objects: tuple[StoredObject, ...]) -> Index:
        plan = self.plan
        crcs, chunk_crcs = sums.checksums()
        return Index(
            identity=identity,
            records=replace(self.records, crc=crcs[plan.order]),
            chunk_crc=chunk_crcs[write.chunk_order(plan)],
            shards=self.digests.filled(crcs[plan.order], sums.digests(), self.table),
            objects=objects,
            pickle_offset=self.pickle_offset,
            pickle_nbytes=len(pickle),
            pickle_crc=checksums.crc32(pickle),
            nested=self.nest is not None,
        )

    def _states(self, objects: Objects) -> list[ProviderState]:
        states = []
        for number, (name, stored) in enumerate(zip(self.table.providers, self.stored, strict=True)):

            def locate(leaf: ArrayLeaf, stored: dict[str, StoredArray] = stored) -> StoredArray:
                found = stored[leaf.key]
                return replace(found, requires_grad=True) if leaf.requires_grad else found

            encoded = {
                s.key: data if isinstance(data, bytes) else data(locate)  # type: ignore[misc]
                for p, s, data in objects
                if p == number
            }
            whole = encoded.get("")
            items = () if whole is not None else tuple({**stored, **encoded}.items())
            states.append(ProviderState(name, whole, items))
        return states


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
    nbytes, offset = shard.buffer.nbytes, shard.buffer_offset
    return StoredArray.within(record, nbytes, shard.dtype, offset, shard.shape, shard.stride)
