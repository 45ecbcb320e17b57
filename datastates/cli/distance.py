"""How far the values of two arrays lie from each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the values of two arrays of one type and shape, A and B, lie from each other.

    Attributes:
        elements: Number of elements of each array.
        differing: Number of elements whose values differ. A NaN equals a NaN, and -0 equals 0.
        not_finite: Number of the differing elements whose difference is no finite number: one of them is, say, NaN.
        most: Largest absolute difference; None if no difference is a finite number.
        at: Index of an element with that difference.
        relative: Norm of the differences divided by the norm of A, both without the elements of ``not_finite``. None if
            A has the norm 0, or if one of the norms is too large for float64.
    """

    elements: int
    differing: int
    not_finite: int
    most: float | None
    at: tuple[int, ...] | None
    relative: float | None

    def __str__(self) -> str:
        """The distance as the end of a sentence about a tensor."""
        if not self.differing:
            return "differs in no value: in the signs of zeros or in the bits of NaN"
        text = f"differs in {self.differing} of {self.elements} elements"
        if self.most is not None:
            text += f", at most by {self.most:.4g} at {list(self.at or ())}"
        if self.relative is not None:
            text += f", by {self.relative:.3g} of its norm"
        return text + (f"; {self.not_finite} of them are not finite" if self.not_finite else "")


def distance(pieces: Iterable[tuple[tuple[int, ...], Any, Any]]) -> Distance:
    """Compare two arrays piece by piece.

    Args:
        pieces: For each piece, the index of its first element, and the piece in A and in B: NumPy arrays of one type.
    """
    elements = differing = not_finite = 0
    most, at, squares, norm = -1.0, None, 0.0, 0.0
    for begin, a, b in pieces:
        elements += a.size
        differs = (a != b) & ~((a != a) & (b != b))
        differing += int(differs.sum())
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        with np.errstate(over="ignore", invalid="ignore"):
            a = a.astype(wide)
            difference = np.where(differs, np.abs(a - b.astype(wide)), 0.0)
            finite = np.isfinite(difference)
            not_finite += int((~finite).sum())
            difference[~finite] = -1.0
            if difference.max() > max(most, 0.0):
                found = np.unravel_index(difference.argmax(), difference.shape)
                at = tuple(int(i + first) for i, first in zip(found, begin, strict=True))
                most = float(difference.max())
            squares += float(np.square(difference[finite]).sum())
            norm += float(np.square(np.abs(a[finite & np.isfinite(a)])).sum())
    known = 0 < norm < np.inf and squares < np.inf
    relative = float(np.sqrt(squares / norm)) if known and at is not None else None
    return Distance(elements, differing, not_finite, None if at is None else most, at, relative)
