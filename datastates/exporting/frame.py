"""Describes one file of an export: the places of its tensors, and its other bytes. The layouts make such files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datastates._base.columns import U32
from datastates.container.named_tensor import Tensor
from datastates.planning.plans import WritePlan


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """One file of an export.

    Attributes:
        name: Its name.
        tensors: Its tensors: the sources of the plan.
        plan: The places of the tensors. The file is written extent by extent.
        literal: The bytes between the tensors, end to end.
        encode_tail: Encodes the bytes after the plan's end, given the CRC-32 of each tensor as written.
        tail_nbytes: Length of these bytes.
    """

    name: str
    tensors: Sequence[Tensor]
    plan: WritePlan
    literal: bytes
    encode_tail: Callable[[U32], bytes] = lambda crcs: b""
    tail_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Length of the file in bytes."""
        return self.plan.end + self.tail_nbytes
