"""A tensor that a file will hold under a name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from datastates.state.dtypes import BY_NAME


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file.

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
        """Its length in the file."""
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize
