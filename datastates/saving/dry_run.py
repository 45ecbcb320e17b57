"""Describes a state for a check that all ranks could commit it. Nothing is written."""

from __future__ import annotations

import numpy as np

from datastates.commit.dry_run import Described
from datastates.errors import TornSnapshotError
from datastates.executor.executor import Executor, columns, prepare_write
from datastates.planning.write import plan_dense_write
from datastates.saving.collect import Collected
from datastates.saving.container_frame import ContainerFraming
from datastates.saving.running import _serialize


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
    ContainerFraming(ranks).plan(structure, executor.block)
    for provider, shard in collected.objects:
        _serialize(collected, provider, shard)
    replicas, addresses = structure.replicas, collected.places.replicas
    found = None
    if replicas is not None and addresses is not None:
        none = np.zeros(0, np.uint64)
        plan = prepare_write(plan_dense_write(none, [], 0, executor.block), b"")
        witness = np.zeros(0, np.uint8)
        job = executor.submit_write(None, plan, columns([]), witness, (replicas.ranges, addresses))
        try:
            job.wait_captured()
            digests, unmapped = job.replica_digests()
        finally:
            job.abort()
        if unmapped:
            raise TornSnapshotError(sorted(structure.key(int(replicas.row[i])) for i in unmapped))
        found = replicas.digests(digests)
    return Described(structure.names, structure.arrays, found)
