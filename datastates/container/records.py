"""The places of a container's storage records, as columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datastates._base.columns import U32, U64
from datastates._base.sizes import DESCRIPTOR
from datastates.planning.plans import WritePlan


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """The storage records of a container, in file order. Offsets and lengths are in bytes.

    Attributes:
        header_offset: File offset of each record's local header.
        data_offset: File offset of each record's data.
        nbytes: Length of each record's data.
        crc: CRC-32 of each record's data; zeros as long as it is unknown.
    """

    header_offset: U64
    data_offset: U64
    nbytes: U64
    crc: U32

    @classmethod
    def of(cls, plan: WritePlan, crc: U32 | None = None) -> Records:
        """The records that a plan lays out. Without ``crc`` their checksums are unknown."""
        unknown = np.zeros(len(plan.order), np.uint32)
        return cls(
            plan.header_offset, plan.data_offset, plan.source_nbytes[plan.order], unknown if crc is None else crc
        )

    def __len__(self) -> int:
        """The number of records."""
        return len(self.data_offset)

    @property
    def end(self) -> int:
        """File offset one past the last record's descriptor; 0 without records."""
        return int(self.data_offset[-1] + self.nbytes[-1]) + DESCRIPTOR if len(self) else 0
