"""Basic indices of arrays, as the boxes that they choose. Pure functions."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from types import EllipsisType
from typing import SupportsIndex, TypeAlias

OneIndex: TypeAlias = SupportsIndex | slice | EllipsisType
Index: TypeAlias = OneIndex | tuple[OneIndex, ...]
"""Integers, slices whose step is 1, and at most one ``...``, as NumPy and torch take them."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """The box of an array that an index chooses.

    Attributes:
        begin: Index of the box's first element.
        size: Elements along each dimension of the array.
        shape: Shape of the result: ``size`` without the dimensions that an integer chooses.
    """

    begin: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]


def indexed(index: Index, shape: tuple[int, ...]) -> Indexed:
    """The box that ``array[index]`` has, for an array of this shape.

    Raises:
        IndexError: An integer is out of range, or there are more indices than dimensions.
        TypeError: The index is another one than :data:`Index`, such as a mask.
        ValueError: A slice has another step than 1.
    """
    given = index if isinstance(index, tuple) else (index,)
    if sum(one is ... for one in given) > 1:
        raise IndexError("an index has at most one ...")
    before = next((i for i, one in enumerate(given) if one is ...), len(given))
    ones = [one for one in given if one is not ...]
    if len(ones) > len(shape):
        raise IndexError(f"{len(ones)} indices for an array of {len(shape)} dimensions")
    ones[before:before] = [slice(None)] * (len(shape) - len(ones))
    chosen = [_chosen(one, n, d) for d, (one, n) in enumerate(zip(ones, shape, strict=True))]
    kept = tuple(size for (_, size), one in zip(chosen, ones, strict=True) if isinstance(one, slice))
    return Indexed(tuple(begin for begin, _ in chosen), tuple(size for _, size in chosen), kept)


def _chosen(one: OneIndex, n: int, dim: int) -> tuple[int, int]:
    """The first element and the number of elements that an index chooses along a dimension of ``n`` elements."""
    if isinstance(one, slice):
        begin, end, step = one.indices(n)
        if step != 1:
            raise ValueError(f"step {step} in dimension {dim}: a part is read with step 1 only; index what was read")
        return begin, max(0, end - begin)
    is_mask = isinstance(one, bool) or str(getattr(one, "dtype", "")).endswith("bool")
    if one is ... or is_mask or not hasattr(one, "__index__") or getattr(one, "shape", ()) != ():
        raise TypeError(f"an index is made of integers, slices and ..., not of {type(one).__name__}")
    at = operator.index(one)
    if not -n <= at < n:
        raise IndexError(f"index {at} is out of range for {n} elements in dimension {dim}")
    return at % n, 1


def nth(shape: tuple[int, ...], dim: int, rank: int, world_size: int) -> Index:
    """The index of a rank's equal part of an array along a dimension.

    Raises:
        IndexError: The array has no such dimension.
        TypeError: An argument is no integer.
        ValueError: The parts would not be equal, or there is no such rank.
    """
    dim, rank, world_size = map(operator.index, (dim, rank, world_size))
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"dimension {dim} of an array of {len(shape)} dimensions")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    nelements, left = divmod(shape[dim], world_size)
    if left:
        raise ValueError(f"{shape[dim]} elements in dimension {dim} do not divide by {world_size}")
    return (*(slice(None),) * (dim % len(shape)), slice(rank * nelements, (rank + 1) * nelements))
