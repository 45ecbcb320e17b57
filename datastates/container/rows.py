"""One provider's rows of an index, by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from datastates._base.cached import cached_property
from datastates._base.columns import I64
from datastates.container.index import Index
from datastates.container.part_columns import PartColumns
from datastates.container.table import FLAT, WHOLE, Row, ShardTable
from datastates.state import dtypes, strides
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
    table, number = rows.index.shards, rows.in_order
    parts = np.flatnonzero(table.part[number] != WHOLE)
    found = PartColumns.of(table, number[parts])
    shapes = zip(found.global_shape.tolist(), found.global_ndim.tolist(), strict=True)
    keys = map(rows.keys_in_order.__getitem__, parts.tolist())
    flat = parts[table.part[number[parts]] == FLAT]
    empty = flat[table.dims[table.starts[0][number[flat]]] == 0]
    others = rows.elsewhere([rows.keys_in_order[i] for i in empty.tolist()])
    laid = {key: row.stride for key, row in others.items() if row.is_whole}
    whole = {key: tuple(shape[len(shape) - ndim :]) for key, (shape, ndim) in zip(keys, shapes, strict=True)}

    def described(key: str, kind: str, dtype: str, shape: Any, stride: Any, *flags: bool) -> ArrayRef:
        if (of := whole.get(key)) is not None:
            shape, stride = of, laid.get(key) or strides.row_major(of)
        return ArrayRef(key, kind, dtype, shape, stride, *flags)

    return described


class StoredRows(Mapping[str, Row]):
    """The rows of one provider by their keys; a row object is made on first access.

    If several rows are parts of one tensor, only the first is here.

    Attributes:
        index: The index of the file.
        elsewhere: Finds, for keys of arrays without elements here, rows in other files that have some.
        in_order: The numbers of the rows in the index's table, ascending.
        keys_in_order: Their keys.
    """

    def __init__(
        self, index: Index, provider: str, elsewhere: Callable[[Sequence[str]], Mapping[str, Row]] = lambda keys: {}
    ) -> None:
        """Find the provider's rows; there may be none."""
        self.index = index
        self.elsewhere = elsewhere
        is_first = np.ones(len(index.shards), bool)
        is_first[[number for _, *others in index.shards.parts.values() for number in others]] = False
        numbers = np.array(index.shards.of_provider(provider), np.int64)
        self.in_order: I64 = numbers[is_first[numbers]]
        self.keys_in_order = index.shards.packed_keys.some(self.in_order)
        self._number: dict[str, int] = dict(zip(self.keys_in_order, self.in_order.tolist(), strict=True))
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
            row = self._made[key] = self.index.shards.row(self._number[key])
        return row

    def numbers(self, keys: Sequence[str]) -> tuple[I64, I64]:
        """For each of these keys that has a row: its number among them, and its row's number in the table."""
        if keys == self.keys_in_order:
            return np.arange(len(keys)), self.in_order
        found = [(i, number) for i, key in enumerate(keys) if (number := self._number.get(key)) is not None]
        which, rows = np.array(found, np.int64).reshape(-1, 2).T
        return which, rows

    def number(self, key: str) -> int:
        """The number of a key's row in the table; raises KeyError if there is none."""
        return self._number[key]

    def make(self, keys: Sequence[str]) -> None:
        """Make the row objects of these keys at once, which is cheaper than one by one; skips keys without a row."""
        new = [key for key in keys if key in self._number and key not in self._made]
        self._made.update(zip(new, self.index.shards.rows([self._number[key] for key in new]), strict=True))

    @cached_property
    def names(self) -> list[str]:
        """For each row, in the order of the index, the name of its place: the last key of the rows there."""
        keys = self.keys_in_order
        if not (tied := same_places(self.index.shards, self.in_order)):
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
