"""What a file of an export holds besides the bytes of the tensors, and where these lie. A layout plans it."""

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
        plan: Where they lie. The file is written extent by extent.
        literal: The bytes between them, end to end.
        encode_tail: Encodes what stands behind the plan's end, given the CRC-32 of each tensor as it is in the file.
        tail_nbytes: Length of that.
    """

    name: str
    tensors: Sequence[Tensor]
    plan: WritePlan
    literal: bytes
    encode_tail: Callable[[U32], bytes] = lambda crcs: b""
    tail_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.plan.end + self.tail_nbytes
