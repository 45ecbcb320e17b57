"""Strides of arrays, in elements."""

from __future__ import annotations

import math
from collections.abc import Sequence


def row_major(shape: Sequence[int]) -> list[int]:
    """Row-major strides."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie in memory one after the other in row-major order."""
    return 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, stride, row_major(shape), strict=True))


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a strided array's first to one past its last; 0 when it has none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their span exactly, each once (a permutation of a contiguous array)."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return 0 in shape
        expected *= size
    return True
