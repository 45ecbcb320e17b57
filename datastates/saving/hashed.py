"""A state with the hash of each of its chunks, compared with the last checkpoint array by array."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datastates._base.cached import cached_property
from datastates._base.columns import I64, U8, Bools
from datastates._base.sizes import CHUNK
from datastates.container.index import Index
from datastates.container.partial_records import hashes_of
from datastates.container.table import WHOLE
from datastates.planning import write
from datastates.saving.bases import Newest
from datastates.saving.container_frame import ContainerFrame
from datastates.saving.structure import Structure
from datastates.state.runs import pairs


@dataclass(frozen=True, eq=False)
class Hashed:
    """The hashes of a state.

    Attributes:
        structure: The state.
        frame: Its frame, in one container.
        chunks: The hash of each chunk, a row of 16 bytes each, buffer after buffer.
    """

    structure: Structure
    frame: ContainerFrame
    chunks: U8

    @cached_property
    def _counts(self) -> I64:
        return -(-self.frame.plan.source_nbytes.astype(np.int64) // CHUNK)

    @cached_property
    def _ends(self) -> I64:
        return np.cumsum(self._counts)

    @cached_property
    def of_chunk(self) -> I64:
        """The number of the buffer that each chunk is of."""
        return np.repeat(np.arange(len(self._counts)), self._counts)

    def of_buffer(self, number: int) -> U8:
        """The hashes of the chunks of a buffer."""
        return self.chunks[self._ends[number] - self._counts[number] : self._ends[number]]

    @property
    def in_file(self) -> U8:
        """The hashes in the order of the file that has all."""
        return self.chunks[write.chunk_order(self.frame.plan)]

    def compared(self, newest: Newest) -> tuple[Bools, Bools]:
        """For each buffer, whether a checkpoint has all its arrays with these bytes, and whether it keeps them."""
        unchanged, kept = np.zeros((2, len(self.structure.source)), bool)
        found, is_same = self._found(newest.own.index)
        unchanged[found[is_same]] = True
        if newest.kept is not None:
            found, is_same = self._found(newest.kept.index)
            unchanged[found[is_same]] = kept[found] = True
        return self.structure.all_of(unchanged), self.structure.all_of(kept)

    def _found(self, index: Index) -> tuple[I64, Bools]:
        """The numbers of the arrays that a container has, and whether it has the same bytes in their records."""
        hashes, table, stored = hashes_of(index), self.frame.table, index.shards
        assert hashes is not None
        keys = list(table.by_key)
        of_key, row = table.find(keys)
        which, other = stored.find(keys)
        match, at = pairs(np.searchsorted(of_key, which, "left"), np.searchsorted(of_key, which, "right"))
        row, other = row[at], other[match]
        alike = table.part[row] == stored.part[other]
        row, other = row[alike], other[alike]
        source_of = np.array(self.structure.source, np.int64)
        whole = table.part[row] == WHOLE
        parts = np.flatnonzero(~whole & (self.frame.plan.source_nbytes[source_of[row]] > 0))
        both = zip(table.rows(row[parts].tolist()), stored.rows(other[parts].tolist()), strict=True)
        whole[parts] = [(mine.box, mine.flat) == (theirs.box, theirs.flat) for mine, theirs in both]
        row, other = row[whole], other[whole]
        source, record = source_of[row], stored.record[other].astype(np.int64)
        is_same: Bools = self.frame.plan.source_nbytes[source] == index.records.nbytes[record]
        begin, end = (self._ends - self._counts)[source[is_same]], self._ends[source[is_same]]
        number, chunk = pairs(begin, end)
        at = chunk - begin[number] + index.first_chunk[record[is_same]][number]
        is_same[np.flatnonzero(is_same)[number[(self.chunks[chunk] != hashes[at]).any(axis=1)]]] = False
        return row, is_same
