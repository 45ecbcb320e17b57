"""Describes a state, and checks that the parts that all ranks describe could be committed. Nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates._base.packing import pack, unpack
from datastates.commit import catalog
from datastates.commit.claims import claims_of, describe_conflicts, is_complete
from datastates.commit.replicas import ReplicaDigests, refuse_difference
from datastates.container.table import ShardTable, table_of
from datastates.errors import CommitError, TornSnapshotError
from datastates.executor.executor import Executor
from datastates.saving.collect import Collected
from datastates.saving.container_frame import ContainerFraming
from datastates.saving.running import _serialize
from datastates.state.shards import Shard


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """What one rank would save.

    Attributes:
        names: The names under which its providers are stored.
        arrays: The array shards, each with its provider's number. Their memory does not count.
        replicas: The digests of the arrays that other ranks hold, too; None if there are none.
    """

    names: tuple[str, ...]
    arrays: Sequence[tuple[int, Shard]]
    replicas: ReplicaDigests | None

    def encode(self) -> bytes:
        """The description as bytes."""
        rows = [[p, s.key, s.dtype, s.kind, s.shape, s.global_shape, s.offset, s.flat] for p, s in self.arrays]
        return pack([self.names, rows, None if self.replicas is None else self.replicas.encode()])

    @classmethod
    def decode(cls, data: bytes) -> Described:
        """The inverse of :meth:`encode`."""
        names, rows, replicas = unpack(data)
        return cls(
            tuple(names),
            [(row[0], _shard(*row[1:])) for row in rows],
            None if replicas is None else ReplicaDigests.decode(replicas),
        )

    def table(self) -> ShardTable:
        """The arrays as the table of a container."""
        return table_of(self.names, self.arrays, [0] * len(self.arrays))


def _shard(key: str, dtype: str, kind: str, shape: Any, global_shape: Any, offset: Any, flat: Any) -> Shard:
    return Shard(
        key=key,
        dtype=dtype,
        kind=kind,
        shape=tuple(shape),
        stride=(0,) * len(shape),
        global_shape=tuple(global_shape),
        offset=None if offset is None else tuple(offset),
        flat=None if flat is None else (flat[0], flat[1]),
    )


def refuse_what_cannot_commit(told: dict[int, bytes]) -> bytes:
    """On the coordinator: check the descriptions of all ranks, by rank.

    Raises:
        CommitError: The ranks' parts do not make one state, or arrays differ that several ranks hold and one writes.
    """
    every = {rank: Described.decode(data) for rank, data in sorted(told.items())}
    tables = {rank: described.table() for rank, described in every.items()}
    claims = [claims_of(table) for table in tables.values()]
    try:
        if not is_complete(claims):
            raise CommitError("the ranks' parts do not make whole tensors")
        catalog.encode_catalog(claims, np.zeros(len(claims), np.uint64), np.zeros(len(claims), np.uint32))
    except (CommitError, catalog.ConflictError) as error:
        raise CommitError(describe_conflicts(tables.items()) or str(error)) from None
    refuse_difference(list(every), claims, [d.replicas for d in every.values()], tables.__getitem__)
    return b""


def describe(executor: Executor, collected: Collected, ranks: int) -> Described:
    """Describe a state, with the digests of its replicas, and try whether it can be stored.

    Args:
        executor: Takes the digests.
        collected: The state.
        ranks: The number of ranks that save together.

    Raises:
        ProviderError: A shard is described wrongly, or an object does not pickle.
        TornSnapshotError: The memory of an array was unmapped meanwhile.
    """
    structure = collected.structure
    ContainerFraming(claims=ranks > 1).plan(structure, executor.block)
    for provider, shard in collected.objects:
        _serialize(collected, provider, shard)
    replicas, addresses = structure.replicas, collected.places.replicas
    found = None
    if replicas is not None and addresses is not None:
        job = executor.submit_digests((replicas.ranges, addresses))
        try:
            job.wait_captured()
            digests, unmapped = job.replica_digests()
        finally:
            job.abort()
        if unmapped:
            raise TornSnapshotError(sorted(structure.key(int(replicas.row[i])) for i in unmapped))
        found = replicas.digests(digests)
    return Described(structure.names, structure.arrays, found)
