"""Describes live and stored parts of logical tensors in columns, which need no object for each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from datastates._base.columns import I64, U8, Bools
from datastates.container.table import FLAT, WHOLE, ShardTable
from datastates.state.parts import Part
from datastates.state.strides import aligned, are_row_major, row_majors


@dataclass(frozen=True, slots=True, eq=False)
class PartColumns:
    """Some parts of logical tensors, one entry of each column for each. Matrices have a line for each.

    Shapes are aligned to the right in their matrices, and filled with ones.

    Attributes:
        dtype: Number of the tensor's element type.
        kind: :data:`~datastates.container.table.WHOLE`, :data:`~datastates.container.table.BOX` or
            :data:`~datastates.container.table.FLAT`.
        global_ndim, global_shape: The shape of the logical tensor, and its length.
        shape: The shape of the part.
        place: Where a box begins in its tensor; in the last column, the first element of a flat range.
        begin: Position of the part's first element in the flattened logical tensor.
        numel: Number of the part's elements.
        in_order: Whether the part lies in memory, or in its file, without gaps and in row-major order.
        is_range: Whether the part's elements follow one another in the flattened logical tensor.
    """

    dtype: U8
    kind: U8
    global_ndim: I64
    global_shape: I64
    shape: I64
    place: I64
    begin: I64
    numel: I64
    in_order: Bools
    is_range: Bools

    @classmethod
    def made(
        cls, dtype: U8, kind: U8, shape: I64, stride: I64, global_ndim: I64, global_shape: I64, place: I64
    ) -> PartColumns:
        """Describe parts by the attributes of the same names, and their strides in elements.

        All matrices have the same width.
        """
        numel, is_flat = shape.prod(axis=1), kind == FLAT
        in_order = are_row_major(shape, stride) | (numel == 0)
        begin, is_range = np.zeros_like(numel), np.ones(len(numel), bool)
        some = np.flatnonzero(kind != WHOLE)
        if len(some):
            steps = row_majors(global_shape[some])
            begin[some] = np.where(is_flat[some], place[some, -1:].sum(axis=1), (place[some] * steps).sum(axis=1))
            is_range[some] = is_flat[some] | (((shape[some] - 1) * steps).sum(axis=1) + 1 == numel[some])
        return cls(dtype, kind, global_ndim, global_shape, shape, place, begin, numel, in_order, is_range)

    @classmethod
    def of_each(cls, given: Sequence[tuple[ShardTable, I64]]) -> PartColumns:
        """Describe the rows of these numbers in the tables of some files, one behind the other."""
        width = max(int(max(table.ndim.max(initial=0), table.global_ndim.max(initial=0))) for table, _ in given)
        each = [cls.of(table, rows, width) for table, rows in given]
        if len(each) == 1:
            return each[0]
        return cls(*(np.concatenate([getattr(one, field.name) for one in each]) for field in fields(cls)))

    @classmethod
    def of(cls, table: ShardTable, rows: I64, width: int = 0) -> PartColumns:
        """Describe the rows of these numbers in a file's table; ``width`` is the least one of the matrices."""
        ndim, kind = table.ndim[rows].astype(np.int64), table.part[rows]
        dims_at, global_at, place_at = [starts[rows] for starts in table.starts]
        global_ndim = np.where(kind == WHOLE, ndim, table.global_ndim[rows])
        width = int(max(ndim.max(initial=width), global_ndim.max(initial=0)))
        shape = aligned(table.dims, dims_at, ndim, width, 1)
        global_shape, place = shape.copy(), np.zeros_like(shape)
        if (some := np.flatnonzero(kind != WHOLE)).size:
            global_shape[some] = aligned(table.global_dims, global_at[some], global_ndim[some], width, 1)
            # of a flat range's two numbers, the first
            place[some] = aligned(table.place, place_at[some], np.where(kind[some] == FLAT, 1, ndim[some]), width, 0)
        stride = aligned(table.strides, dims_at, ndim, width, 0)
        return cls.made(table.dtype[rows], kind, shape, stride, global_ndim, global_shape, place)

    def tensors(self) -> PartColumns:
        """For each part, its whole logical tensor."""
        kind, shape = np.full_like(self.kind, WHOLE), self.global_shape
        return self.made(self.dtype, kind, shape, row_majors(shape), self.global_ndim, shape, np.zeros_like(shape))

    def __len__(self) -> int:
        """The number of parts."""
        return len(self.numel)

    def __getitem__(self, which: I64 | Bools) -> PartColumns:
        """Some of the parts."""
        return PartColumns(*[getattr(self, field.name)[which] for field in fields(self)])

    def part(self, i: int) -> Part:
        """Part number ``i`` as an object; it is no flat range."""
        columns = self.global_shape, self.shape, self.place
        global_shape, shape, offset = (tuple(m[i, m.shape[1] - self.global_ndim[i] :].tolist()) for m in columns)
        return Part(global_shape, shape, offset)

    def of_same_tensors(self, other: PartColumns) -> Bools:
        """For each pair of parts, whether both tensors have the same element type and shape."""
        alike: Bools = (self.dtype == other.dtype) & (self.global_ndim == other.global_ndim)
        alike &= _equal(self.global_shape, other.global_shape)
        return alike

    def are(self, other: PartColumns) -> Bools:
        """For each pair of parts of one tensor, whether they are the same box, or the same flat range."""
        alike: Bools = ((self.kind == FLAT) == (other.kind == FLAT)) & (self.begin == other.begin)
        alike &= _equal(self.shape, other.shape)
        return alike


def _equal(one: I64, other: I64) -> Bools:
    """Whether the lines of two matrices of aligned shapes are equal."""
    more, fewer = (one, other) if one.shape[1] >= other.shape[1] else (other, one)
    filled = more.shape[1] - fewer.shape[1]
    equal: Bools = (more[:, filled:] == fewer).all(axis=1) & (more[:, :filled] == 1).all(axis=1)
    return equal
