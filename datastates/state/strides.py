"""Strides of arrays, in elements."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from datastates._base.columns import I64, U64, Bools


@functools.lru_cache(maxsize=1024)  # a model has few shapes
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of a shape."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def row_majors(shapes: I64) -> I64:
    """Row-major strides of many shapes. ``shapes`` and the result are matrices with a row for each shape."""
    beyond = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    return np.append(beyond, np.ones((len(shapes), min(1, shapes.shape[1])), np.int64), axis=1)


def are_row_major(shapes: I64, strides: I64) -> Bools:
    """Whether each of many arrays that have elements is contiguous in memory, in row-major order."""
    alike: Bools = ((strides == row_majors(shapes)) | (shapes == 1)).all(axis=1)
    return alike


def aligned(numbers: U64, starts: I64, counts: I64, width: int, filler: int) -> I64:
    """Copy tuples that lie end to end in ``numbers`` into rows of a matrix: aligned to the right, filled on the left.

    Args:
        numbers: The tuples' numbers.
        starts: For each tuple, the number of its first entry in ``numbers``.
        counts: The length of each tuple. Of a tuple longer than ``width``, the first numbers are left out.
        width: Length of the rows.
        filler: Fills the rows.
    """
    at = np.arange(width) - width + counts[:, None]
    result = np.full(at.shape, filler, np.int64)
    given = at >= 0
    result[given] = numbers[(starts[:, None] + at)[given]]
    return result


def is_row_major(shape: tuple[int, ...], stride: Sequence[int]) -> bool:
    """Whether the elements are contiguous in memory, in row-major order."""
    steps = row_major(shape)
    return stride == steps or 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, stride, steps, strict=True))


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from the first to the last element of a strided array, gaps included; 0 if it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their span without gaps or repetition, as in a permuted contiguous array."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return 0 in shape
        expected *= size
    return True


def overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether several elements of a strided array lie at the same place in memory."""
    if 0 in shape:
        return False
    steps = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1)
    spans = itertools.accumulate(((size - 1) * step for step, size in steps), initial=1)
    if all(step >= below for (step, _), below in zip(steps, spans, strict=False)):
        return False
    if steps[0][0] == 0 or math.prod(shape) > span(shape, stride):
        return True
    places = np.zeros(1, np.int64)
    for step, size in steps:
        places = np.unique(np.add.outer(places, step * np.arange(size)))
    return len(places) < math.prod(shape)


class _Memory:
    """Stands for memory that is neither read nor written, as an array of NumPy."""

    def __init__(self, pointer: int, shape: Sequence[int], stride: Sequence[int], itemsize: int) -> None:
        steps = tuple(step * itemsize for step in stride)
        kind = {"typestr": f"|V{itemsize}", "shape": tuple(shape), "strides": steps, "data": (pointer, True)}
        self.__array_interface__ = {"version": 3, **kind}


_MOST_PAIRS = 4096
"""Most pairs of arrays that are compared."""
_MOST_WORK: Any = 100_000  # NumPy's stubs know two values only
"""Most work of NumPy's solver on one pair: the exact answer may take for ever."""


def have_common_elements(views: Sequence[tuple[int, Sequence[int], Sequence[int]]], itemsize: int) -> bool:
    """Whether two strided arrays of one type have an element in common; also True if that takes too long to tell.

    Args:
        views: For each array: the address of its first element, its shape, its stride.
        itemsize: Bytes of an element.
    """
    views = sorted((view for view in views if 0 not in view[1]), key=lambda view: view[0])
    ends = [pointer + span(shape, stride) * itemsize for pointer, shape, stride in views]
    held = [np.asarray(_Memory(*view, itemsize)) for view in views]
    pairs = 0
    for i, end in enumerate(ends):
        for j in range(i + 1, len(views)):
            if views[j][0] >= end:
                break
            pairs += 1
            if pairs > _MOST_PAIRS or _share(held[i], held[j]):
                return True
    return False


def _share(one: Any, other: Any) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True
