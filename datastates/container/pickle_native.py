"""The structure of an object that is nothing but containers, plain values and arrays, read in one native pass.

It reads what this package writes for a ``state_dict``, some twenty times as fast as
:mod:`datastates.container.pickle_reader`, and nothing else: whatever is different is left to that.
"""

from __future__ import annotations

import collections

from datastates import _native
from datastates.container.pickle_writer import array_frame
from datastates.container.rows import StoredRows
from datastates.container.table import KINDS
from datastates.state import dtypes
from datastates.state.shards import ArrayRef

_DTYPES = tuple(dtype.name for dtype in dtypes.ALL)


def read_plain(opcodes: bytes, rows: StoredRows) -> tuple[object] | None:
    """The value, in a tuple, with an ArrayRef for each array; None unless it is plain and has these arrays in order.

    Args:
        opcodes: What pushes the object, verified.
        rows: The arrays of its provider.
    """
    columns = rows.columns(rows.keys_in_order)
    return _native.read_plain_pickle(
        opcodes,
        keys=rows.names,
        kinds=KINDS,
        dtypes=_DTYPES,
        frames=[(*array_frame(d), d.itemsize, d.storage is not None) for d in dtypes.ALL],
        kind=columns.kind,
        dtype=columns.dtype,
        record=columns.record,
        record_nbytes=columns.record_nbytes,
        offset=columns.offset,
        ndim=columns.ndim,
        dims=columns.dims,
        strides=columns.strides,
        reference=ArrayRef,
        ordered_dict=collections.OrderedDict,
    )
