"""The places of the records in a file of another format, for the planner. Chunks of records have no checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from datastates._base.cached import cached_property
from datastates._base.columns import U64
from datastates.errors import CorruptError
from datastates.planning.plans import Chunks
from datastates.planning.read import plan_chunks
from datastates.storage.location import Location


@dataclass(frozen=True, slots=True)
class Record:
    """A range of a file that holds tensors.

    Attributes:
        offset, nbytes: The range, in bytes.
        crc: CRC-32 of the whole range; None if the file has none.
    """

    offset: int
    nbytes: int
    crc: int | None


class RecordFile:
    """A file as ranges without checksums of chunks, for :class:`~datastates.reading.reads.Reads`.

    Attributes:
        path: The file.
        nbytes: Its length.
        records: The ranges, by offset.
    """

    def __init__(self, path: Location, nbytes: int, records: Sequence[Record]) -> None:
        """Take the ranges, which lie within the file, ascend and do not overlap."""
        self.path = path
        self.nbytes = nbytes
        self.records = records

    @cached_property
    def data_offset(self) -> U64:
        """File offset of each record, ascending."""
        return np.array([record.offset for record in self.records], np.uint64)

    @cached_property
    def record_nbytes(self) -> U64:
        """Length of each record in bytes."""
        return np.array([record.nbytes for record in self.records], np.uint64)

    def chunks(self, first: int, last: int) -> Chunks:
        """The chunks of the records from ``first`` to before ``last``; they have no checksums of their own."""
        run = slice(first, last)
        found = plan_chunks(self.data_offset[run], self.record_nbytes[run], np.zeros(0, np.uint32))
        return replace(found, record=found.record + np.int32(first), checked=False)

    def corrupt(self, key: str) -> CorruptError:
        """The error that names this file and the damaged tensor."""
        return CorruptError(f"{key!r} in {self.path} does not match its checksum", key=key, path=str(self.path))


def overlap(records: Sequence[Record], nbytes: int) -> bool:
    """Whether any of some records, sorted by offset, overlap or reach beyond a file of so many bytes."""
    ends = [0, *(record.offset + record.nbytes for record in records)]
    begins = [*(record.offset for record in records), nbytes]
    return any(end > begin for end, begin in zip(ends, begins, strict=True))
