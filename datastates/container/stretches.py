"""Describes rows of a file's table as stretches of flattened logical tensors, in columns: no object for each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datastates._base.columns import I64, U64, Bools
from datastates.container.table import BOX, FLAT, WHOLE, ShardTable
from datastates.state.dtypes import DType
from datastates.state.strides import row_majors


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Some rows of a file, one column entry for each.

    Attributes:
        begin: Position in the flattened logical tensor of the row's first element.
        numel: Number of the row's elements.
        offset: File offset of the first element in bytes.
        whole: Whether the row is all of its tensor, in the tensor's shape.
        is_one: Whether the row's elements follow one another, both in the flattened tensor and in the file.
    """

    begin: I64
    numel: I64
    offset: I64
    whole: Bools
    is_one: Bools

    @classmethod
    def of(cls, table: ShardTable, data_offset: U64, rows: I64) -> Stretches:
        """Describe the rows of these numbers; ``data_offset`` is the file offset of each record's data."""
        ndim, part = table.ndim[rows].astype(np.int64), table.part[rows]
        dims_at, global_at, place_at = (starts[rows] for starts in table.starts)
        width = int(ndim.max(initial=0))
        size = aligned(table.dims, dims_at, ndim, width, 1)
        stride = aligned(table.strides, dims_at, ndim, width, 0)
        box, flat = part == BOX, part == FLAT
        total, place = size.copy(), np.zeros_like(size)
        total[box] = aligned(table.global_dims, global_at[box], ndim[box], width, 1)
        place[box] = aligned(table.place, place_at[box], ndim[box], width, 0)
        place[flat, -1:] = aligned(table.place, place_at[flat], np.ones_like(ndim[flat]), 1, 0)
        steps, numel = row_majors(total), size.prod(axis=1)
        straight = ((stride == row_majors(size)) | (size == 1)).all(axis=1)
        return cls(
            begin=(place * steps).sum(axis=1),
            numel=numel,
            offset=(data_offset[table.record[rows]] + table.offset[rows]).astype(np.int64),
            whole=part == WHOLE,
            is_one=straight & (((size - 1) * steps).sum(axis=1) + 1 == numel),
        )


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
    result[at >= 0] = numbers[(starts[:, None] + at)[at >= 0]]
    return result


def forms(table: ShardTable, rows: I64, width: int) -> I64:
    """Encode the element type and logical shape of each row as numbers: a matrix, with equal lines for equal ones.

    ``width`` is the largest number of dimensions among the shapes to compare with.
    """
    whole = table.part[rows] == WHOLE
    starts, global_starts, _ = (starts[rows] for starts in table.starts)
    ndim = np.where(whole, table.ndim[rows], table.global_ndim[rows]).astype(np.int64)
    shape = aligned(table.global_dims, np.where(whole, 0, global_starts), np.where(whole, 0, ndim), width, 1)
    shape[whole] = aligned(table.dims, starts[whole], ndim[whole], width, 1)
    return np.column_stack((table.dtype[rows].astype(np.int64), ndim, shape))


def form(dtype: DType, shape: tuple[int, ...], width: int) -> list[int]:
    """Encode the element type and shape of one logical tensor as numbers, as :func:`forms` does for rows."""
    return [dtype.code, len(shape), *(1,) * (width - len(shape)), *shape]
