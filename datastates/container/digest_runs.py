"""The places of a table's rows in their logical tensors, and the stretches of bytes for computing their digests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datastates._base.columns import I64, Bools
from datastates.container.part_columns import PartColumns
from datastates.container.table import BOX, Row, ShardTable
from datastates.planning.plans import DigestRuns
from datastates.state.runs import grid, pairs
from datastates.state.strides import row_major, row_majors
from datastates.state.tensor_scan import ITEMSIZES


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The places of rows in their logical tensors, in bytes; one entry for each row.

    A *run* is a longest part of a row that is contiguous in the flattened logical tensor. All runs of a row have the
    same length. A *stretch* is ``count`` consecutive runs that are equally far apart in the logical tensor. A row's
    elements, in row-major order, are one or more stretches.

    Attributes:
        table: The rows.
        nbytes: Length of the row's elements.
        total: Length of its logical tensor.
        begin: Offset of its first run in the logical tensor.
        run: Length of each of its runs.
        count: Number of runs in each of its stretches.
        step: Distance in the logical tensor from the begin of one run to the begin of the next in the same stretch.
        in_order: Whether its elements lie in their record in row-major order, without gaps.
    """

    table: ShardTable
    nbytes: I64
    total: I64
    begin: I64
    run: I64
    count: I64
    step: I64
    in_order: Bools

    @property
    def is_run(self) -> Bools:
        """Whether each row is a single run."""
        single: Bools = self.run == self.nbytes
        return single

    def runs(self, rows: I64, source: I64, offset: I64) -> DigestRuns:
        """The stretches of some rows, for one digest a row.

        Args:
            rows: Numbers of the rows; each row must have elements.
            source: For each of these rows, the source that holds its elements.
            offset: For each of these rows, where in the source its elements begin. They must lie there in row-major
                order, without gaps.

        Returns:
            The stretches, by source, then by offset. Digest ``i`` belongs to ``rows[i]``.
        """
        length = self.count[rows] * self.run[rows]
        stretches = self.nbytes[rows] // length
        digest, within = pairs(0, stretches)
        begin = np.repeat(self.begin[rows], stretches)
        apart = [_stretches(self.table.row(i)) for i in rows[stretches > 1]]
        begin[stretches[digest] > 1] += np.concatenate([np.zeros(0, np.int64), *apart])
        row = rows[digest]
        place = offset[digest] + within * length[digest]
        order = np.lexsort((place, source[digest]))
        return DigestRuns(
            digests=len(rows),
            source=source[digest][order].astype(np.int32),
            offset=place[order].astype(np.uint64),
            length=length[digest][order].astype(np.uint64),
            run_length=self.run[row][order].astype(np.uint64),
            after=(self.total[row] - begin - self.run[row])[order].astype(np.uint64),
            step=self.step[row][order].astype(np.uint64),
            digest=digest[order].astype(np.uint32),
        )


def places_of(table: ShardTable) -> Places:
    """Find the places of all rows of a table that has been checked."""
    columns = PartColumns.of(table, np.arange(len(table)), 1)
    shape, whole, numel = columns.shape, columns.global_shape, columns.numel
    # A run spans the last partial dimension of a box and all dimensions behind it; all of another row is one run. A
    # stretch spans further: it begins with the partial dimension before that one.
    partial = (shape != whole) & ((table.part == BOX) & (numel > 0))[:, None]
    last = _last(partial)
    first = _last(partial & (np.arange(shape.shape[1]) < last[:, None]))
    each = np.arange(len(table))
    spans = np.cumprod(shape[:, ::-1], axis=1)[:, ::-1]
    run = spans[each, last]
    count = np.where(numel > 0, spans[each, first] // np.maximum(run, 1), 1)
    step = np.where(last > 0, row_majors(whole)[each, last - 1], run)
    total, begin = whole.prod(axis=1), columns.begin
    itemsize = ITEMSIZES[table.dtype].astype(np.int64)
    return Places(
        table,
        numel * itemsize,
        total * itemsize,
        begin * itemsize,
        run * itemsize,
        count,
        step * itemsize,
        columns.in_order,
    )


def _last(marked: Bools) -> I64:
    """The number of the last marked column of each row; 0 where no column is marked."""
    found: I64 = np.where(marked, np.arange(marked.shape[1]), 0).max(axis=1, initial=0)
    return found


def _stretches(row: Row) -> I64:
    """Offset of each stretch of a box in the logical tensor, in bytes from the begin of the first stretch."""
    partial = [d for d, (a, b) in enumerate(zip(row.shape, row.global_shape, strict=True)) if a != b]
    outer = partial[-2]
    return grid(row.shape[:outer], row_major(row.global_shape)[:outer]) * row.dtype.itemsize
