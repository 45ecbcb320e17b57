"""One provider's rows of an index, by key as objects, or as columns, which need no object for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from datastates._base.columns import I64, U8, U32, U64
from datastates.container.index import Index
from datastates.container.table import WHOLE, Row, ShardTable
from datastates.state import dtypes, strides
from datastates.state.runs import pairs
from datastates.state.shards import ArrayRef, StoredArray

DataPlace = tuple[str, int, str, tuple[int, ...], tuple[int, ...]]
"""Record, offset, type, shape and strides of an array, as in ``data.pkl``: rows of one place are the same memory."""


def place_of(row: Row) -> DataPlace:
    """The place of a row's elements, equal for rows of the same memory."""
    return str(row.record), row.offset // row.dtype.itemsize, dtypes.pickled(row.dtype).name, row.shape, row.stride


def place_in_pickle(stored: StoredArray) -> DataPlace:
    """The place of an array's elements, from a reference in ``data.pkl``."""
    return stored.record, stored.offset, stored.dtype, stored.shape, stored.stride


def same_places(table: ShardTable, rows: I64) -> list[list[int]]:
    """Groups of two or more of these rows that are the same memory, each as ascending positions in ``rows``."""
    record, offset = table.record[rows], table.offset[rows]
    order = np.lexsort((offset, record))
    alike = (np.diff(record[order]) == 0) & (np.diff(offset[order]) == 0)
    if not alike.any():
        return []
    suspects = np.unique(np.concatenate((order[:-1][alike], order[1:][alike]))).tolist()
    groups: dict[DataPlace, list[int]] = {}
    for i, row in zip(suspects, table.rows(rows[suspects].tolist()), strict=True):
        groups.setdefault(place_of(row), []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def reference(row: Row, *, key: str | None = None, requires_grad: bool = False) -> ArrayRef:
    """Describe a row as an array of its own. A part of a logical tensor becomes an array of the part's shape."""
    return ArrayRef(row.key if key is None else key, row.kind, row.dtype.name, row.shape, row.stride, requires_grad)


def logical(row: Row, *, key: str | None = None, requires_grad: bool = False) -> ArrayRef:
    """Describe the whole logical tensor of a row, as providers see it."""
    found = reference(row, key=key, requires_grad=requires_grad)
    if row.is_whole:
        return found
    return replace(found, shape=row.global_shape, stride=strides.row_major(row.global_shape))


def of_tensor(rows: StoredRows) -> Callable[..., ArrayRef]:
    """A function that takes the fields of an ArrayRef of a row, and describes the whole logical tensor of the row."""
    rows.make(rows.keys_in_order)
    whole = {key: None if (row := rows[key]).is_whole else row.global_shape for key in rows}

    def described(key: str, kind: str, dtype: str, shape: Any, stride: Any, *flags: bool) -> ArrayRef:
        if (of := whole[key]) is not None:
            shape, stride = of, strides.row_major(of)
        return ArrayRef(key, kind, dtype, shape, stride, *flags)

    return described


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Some rows of an index, in columns as in :class:`~datastates.container.table.ShardTable`.

    Attributes:
        kind, dtype, record, offset, ndim: One entry for each row; offsets are bytes within the record.
        dims, strides: Shapes and strides in elements, rows end to end.
        whole: Whether each row is the whole of its logical tensor.
        record_nbytes: For each row, the length in bytes of its whole record.
        file_offset: For each row, the file offset in bytes of its first element.
    """

    kind: U8
    dtype: U8
    record: U32
    offset: U64
    ndim: U8
    dims: U64
    strides: U64
    whole: np.ndarray[Any, np.dtype[np.bool_]]
    record_nbytes: U64
    file_offset: U64


class StoredRows(Mapping[str, Row]):
    """The rows of one provider by their keys; a row object is made on first access.

    If several rows are parts of one tensor, only the first is here.

    Attributes:
        keys_in_order: The keys, in the order of the index.
    """

    def __init__(self, index: Index, provider: str) -> None:
        """Find the provider's rows; there may be none."""
        self._index = index
        numbers = np.array(index.shards.of_provider(provider), np.int64)
        self._numbers: I64 = numbers[index.shards.by_key.is_first[numbers]]
        self.keys_in_order = index.shards.packed_keys.some(self._numbers)
        self._number: dict[str, int] = dict(zip(self.keys_in_order, self._numbers.tolist(), strict=True))
        self._made: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __contains__(self, key: object) -> bool:
        return key in self._number

    def __getitem__(self, key: str) -> Row:
        row = self._made.get(key)
        if row is None:
            row = self._made[key] = self._index.shards.row(self._number[key])
        return row

    def numbers(self, keys: Sequence[str]) -> tuple[I64, I64]:
        """For each of these keys that has a row: its number among them, and its row's number in the table."""
        if keys == self.keys_in_order:
            return np.arange(len(keys)), self._numbers
        found = [(i, number) for i, key in enumerate(keys) if (number := self._number.get(key)) is not None]
        which, rows = np.array(found, np.int64).reshape(-1, 2).T
        return which, rows

    def number(self, key: str) -> int:
        """The number of a key's row in the table; raises KeyError if there is none."""
        return self._number[key]

    def make(self, keys: Sequence[str]) -> None:
        """Make the row objects of these keys at once, which is cheaper than one by one; skips keys without a row."""
        new = [key for key in keys if key in self._number and key not in self._made]
        self._made.update(zip(new, self._index.shards.rows([self._number[key] for key in new]), strict=True))

    def columns(self, keys: Sequence[str]) -> Columns:
        """The rows of these keys as columns; raises KeyError for a key without a row."""
        table, rows = self._index.shards, self._numbers
        if keys != self.keys_in_order:
            rows = np.array([self._number[key] for key in keys], np.int64)
        begin, record = table.starts[0][rows], table.record[rows]
        _, dims = pairs(begin, begin + table.ndim[rows])
        return Columns(
            table.kind[rows],
            table.dtype[rows],
            record,
            table.offset[rows],
            table.ndim[rows],
            table.dims[dims],
            table.strides[dims],
            table.part[rows] == WHOLE,
            self._index.records.nbytes[record],
            self._index.records.data_offset[record] + table.offset[rows],
        )

    @cached_property
    def names(self) -> list[str]:
        """For each row, in the order of the index, the name of its place: the last key of the rows there."""
        keys = self.keys_in_order
        if not (tied := same_places(self._index.shards, self._numbers)):
            return keys
        names = list(keys)
        for group in tied:
            for i in group:
                names[i] = keys[group[-1]]
        return names

    @cached_property
    def by_place(self) -> dict[DataPlace, str]:
        """For each place, the last key of the rows there."""
        self.make(self.keys_in_order)
        return {place_of(self[key]): key for key in self.keys_in_order}

    @cached_property
    def _name(self) -> dict[str, str]:
        return dict(zip(self.keys_in_order, self.names, strict=True))

    def names_of(self, keys: Sequence[str]) -> Sequence[str]:
        """For each of these keys, the name of its place, as in :attr:`names`; a key without a row stays as it is."""
        return keys if self.names is self.keys_in_order else [self._name.get(key, key) for key in keys]
