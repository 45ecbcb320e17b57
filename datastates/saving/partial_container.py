"""The part of a container that is written where the rest lies in a container of the same layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from datastates._base.columns import I64, U32, Bools
from datastates.container import archive
from datastates.container.partial_records import chunk_records, combined, literal_over, same_rows
from datastates.executor.executor import PreparedWrite, prepare_write
from datastates.planning import write
from datastates.planning.partial import PartialPlan, plan_partial
from datastates.planning.plans import DigestRuns
from datastates.saving.bases import Base
from datastates.saving.container_frame import ContainerFrame
from datastates.saving.frame import Checksums


@dataclass(frozen=True, slots=True, eq=False)
class PartialContainer:
    """A part of a container, planned over a base.

    Attributes:
        frame: The frame of the whole container.
        base: The container that has the rest.
        partial: The plan of the part.
        prepared: The plan in the form that the executor takes.
        digested: Numbers of the digests that the part has anew.
    """

    frame: ContainerFrame
    base: Base
    partial: PartialPlan
    prepared: PreparedWrite
    digested: I64

    @classmethod
    def of(cls, frame: ContainerFrame, base: Base, changed: Bools, block: int) -> PartialContainer:
        """Plan a part.

        Args:
            frame: The frame of the whole container. Its records lie where those of the base do.
            base: The base.
            changed: For each chunk, in file order, whether it differs from the base's.
            block: Longest extent in bytes.
        """
        folded = np.zeros(len(frame.records), bool)
        folded[frame.table.record[frame.digests.folded]] = True  # a digest is of all bytes of the row
        if not same_rows(frame.table, base.index.shards):
            changed = changed | folded[chunk_records(frame.records)]
        partial = plan_partial(frame.plan, changed, folded, block)
        runs, digested = _digest_runs(frame, partial)
        literal = literal_over(archive.encode_framing(frame.records, frame.nest), partial, base.index)
        return cls(frame, base, partial, prepare_write(partial.plan, literal, runs), digested)

    @property
    def source(self) -> I64:
        """For each source of the part, the source of the whole container that it lies in."""
        return self.frame.plan.order[self.partial.record]

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the container that lie in the base."""
        return int(self.partial.shared[1].sum())

    def with_rest(self, job: Checksums) -> Whole:
        """The checksums of the whole container, from those of a job that has written the part."""
        crcs, chunks = combined(self.base.index, self.partial.written, job.checksums()[1])
        plan = self.frame.plan
        of_sources, of_chunks = np.empty_like(crcs), np.empty_like(chunks)
        of_sources[plan.order] = crcs
        of_chunks[write.chunk_order(plan)] = chunks
        digests = (
            self.base.index.shards.digest[self.frame.digests.folded] if len(self.frame.digests.folded) else crcs[:0]
        )
        digests = digests.copy()
        digests[self.digested] = job.digests()
        return Whole(of_sources, of_chunks, digests)


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Checksums of a whole container; see :class:`~datastates.saving.frame.Checksums`."""

    of_sources: U32
    of_chunks: U32
    of_runs: U32

    def checksums(self) -> tuple[U32, U32]:
        """The checksums of the sources and of their chunks."""
        return self.of_sources, self.of_chunks

    def digests(self) -> U32:
        """The digests of the plan's runs."""
        return self.of_runs


def _digest_runs(frame: ContainerFrame, partial: PartialPlan) -> tuple[DigestRuns, I64]:
    """The runs of the digests that a part has anew, and the numbers of these digests."""
    runs, order = frame.digests.runs, frame.plan.order
    number = np.full(len(order), -1, np.int64)  # of each source in the part, if it is there
    number[order[partial.record]] = np.arange(len(partial.record))
    source = number[runs.source]
    chosen = np.flatnonzero(source >= 0)
    chosen = chosen[np.lexsort((runs.offset[chosen], source[chosen]))]
    digested, digest = np.unique(runs.digest[chosen], return_inverse=True)
    columns = {name: getattr(runs, name)[chosen] for name in ("offset", "length", "run_length", "after", "step")}
    made = replace(
        runs, digests=len(digested), source=source[chosen].astype(np.int32), digest=digest.astype(np.uint32), **columns
    )
    return made, digested.astype(np.int64)
