"""Reads objects of only containers, plain values and arrays in one native pass.

It reads the pickles that this package writes for a ``state_dict``, some twenty times as fast as
:mod:`datastates.container.pickle_reader`. That module must read all other objects.
"""

from __future__ import annotations

import collections

from datastates import _native
from datastates.container.pickle_writer import array_frame
from datastates.container.rows import StoredRows, of_tensor
from datastates.container.table import KINDS, WHOLE
from datastates.state import dtypes
from datastates.state.runs import pairs
from datastates.state.shards import ArrayRef

_DTYPES = tuple(dtype.name for dtype in dtypes.ALL)


def read_plain(opcodes: bytes, rows: StoredRows, *, logical: bool) -> tuple[object] | None:
    """Read a plain object, with an ArrayRef for each array.

    Args:
        opcodes: The opcodes that push the object, verified.
        rows: The arrays of its provider.
        logical: Whether a reference describes the whole logical tensor of its row, instead of the row alone.

    Returns:
        The object, in a tuple. None where it holds anything but dicts, lists, tuples, plain values and arrays, or where
        its arrays are not these rows in their order.
    """
    table, number, records = rows.index.shards, rows.in_order, rows.index.records
    begin, record = table.starts[0][number], table.record[number]
    _, entries = pairs(begin, begin + table.ndim[number])
    is_cut = logical and bool((table.part[number] != WHOLE).any())
    return _native.read_plain_pickle(
        opcodes,
        keys=rows.names,
        kinds=KINDS,
        dtypes=_DTYPES,
        frames=[(*array_frame(d), d.itemsize, dtypes.pickled(d).storage is not None) for d in dtypes.ALL],
        kind=table.kind[number],
        dtype=table.dtype[number],
        record=record,
        record_nbytes=records.nbytes[record],
        offset=table.offset[number],
        ndim=table.ndim[number],
        dims=table.dims[entries],
        strides=table.strides[entries],
        reference=of_tensor(rows) if is_cut else ArrayRef,
        ordered_dict=collections.OrderedDict,
    )
