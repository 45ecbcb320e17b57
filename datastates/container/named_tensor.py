"""Describes a tensor that is to be written into a file under a name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from datastates.state.dtypes import BY_NAME


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file that is to be written.

    Attributes:
        key: Its full key in the checkpoint.
        name: Its name in the file.
        dtype: Torch's name of its element type in the file.
        shape: Its shape.
    """

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of the tensor in the file, in bytes."""
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize
