"""The rows of a container's index as columns: each tells the place of one part of a logical tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates._base.cached import cached_property
from datastates._base.columns import I64, U8, U32, U64
from datastates.container.key_table import PackedKeys
from datastates.errors import FormatError
from datastates.state import dtypes
from datastates.state.parts import Part
from datastates.state.shards import Shard, full_key

KINDS = ("torch", "numpy", "cupy", "jax")
"""Array libraries by their number in the index: append, never renumber."""

MAX_NDIM = 64
"""Most dimensions that NumPy and torch can hold."""

WHOLE, BOX, FLAT = 0, 1, 2
"""The kinds of part of a logical tensor that a row can be: all of it, a box, or a range of its flattened elements."""
_NUMBERS = ("provider", "kind", "dtype", "record", "offset", "part", "ndim", "global_ndim", "digest", "digested")
"""The columns that have one number for each row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One stored array shard: a logical tensor or a part of one.

    Attributes:
        key: Its full key, provider name included.
        kind: Array library.
        dtype: Element type.
        record: Number of the storage record, in file order.
        offset: Bytes from the record's begin to the first element.
        shape: Elements along each dimension, of this part.
        stride: Elements to step along each dimension.
        global_shape: Shape of the logical tensor.
        box: First index of this part in the logical tensor along each dimension; None for a flat range.
        flat: First and one past the last element in the flattened logical tensor; None unless it is a flat range.
        digest: Its contribution to the digest of the logical tensor; None if it was not computed.
    """

    key: str
    kind: str
    dtype: dtypes.DType
    record: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    global_shape: tuple[int, ...]
    box: tuple[int, ...] | None
    flat: tuple[int, int] | None
    digest: int | None

    @property
    def part(self) -> Part:
        """The part of its logical tensor that the row holds."""
        return Part(self.global_shape, self.shape, self.box, self.flat)

    @property
    def is_whole(self) -> bool:
        """Whether the row is all of its logical tensor, in the tensor's shape."""
        return self.flat is None and self.shape == self.global_shape


@dataclass(frozen=True, eq=False)
class ShardTable:
    """All array shards of a container, as columns.

    ``dims``, ``strides``, ``global_dims`` and ``place`` hold the rows' tuples laid end to end.

    Attributes:
        providers: Names of the providers.
        provider: For each row, its provider's number.
        keys: For each row, its key within the provider.
        kind, dtype: For each row, its numbers in :data:`KINDS` and :data:`datastates.state.dtypes.ALL`.
        record: For each row, the number of its storage record.
        offset: For each row, bytes from the record's begin.
        part: For each row, :data:`WHOLE`, :data:`BOX` or :data:`FLAT`.
        ndim: For each row, the number of its entries in ``dims`` and ``strides``.
        dims, strides: Shapes and strides in elements.
        global_ndim: For each row, the number of its entries in ``global_dims``; 0 for a whole.
        global_dims: Shapes of the logical tensors of boxes and flat ranges.
        place: For each box its offsets, for each flat range its first element and one past its last.
        digest: For each row, its contribution to the digest of its logical tensor; 0 where unknown.
        digested: For each row, 1 where ``digest`` is known.
        bare: Whether ``keys`` are full keys, as in files of other formats. There is one provider then, without a name.
    """

    providers: tuple[str, ...]
    provider: U32
    keys: Sequence[str]
    kind: U8
    dtype: U8
    record: U32
    offset: U64
    part: U8
    ndim: U8
    dims: U64
    strides: U64
    global_ndim: U8
    global_dims: U64
    place: U64
    digest: U32
    digested: U8
    bare: bool = False

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.keys)

    @cached_property
    def starts(self) -> tuple[I64, ...]:
        """For each row, where its entries begin in ``dims`` and ``strides``, in ``global_dims``, and in ``place``."""
        return tuple(np.cumsum(n) - n for n in self._counts)

    @cached_property
    def _counts(self) -> tuple[I64, ...]:
        """For each row, the counts of its entries in ``dims`` and ``strides``, in ``global_dims``, and in ``place``."""
        ndim, global_ndim = self.ndim.astype(np.int64), self.global_ndim.astype(np.int64)
        return ndim, global_ndim, np.where(self.part == FLAT, 2, np.where(self.part == BOX, global_ndim, 0))

    @cached_property
    def packed_keys(self) -> PackedKeys:
        """The rows' keys, packed as the index stores them."""
        return PackedKeys.of(self.keys)

    @cached_property
    def by_key(self) -> dict[str, int]:
        """The number of the first row with each full key, in the order of the rows."""
        by_key: dict[str, int] = {}
        for number, full in enumerate(self._full_keys()):
            by_key.setdefault(full, number)
        return by_key

    @cached_property
    def parts(self) -> dict[int, list[int]]:
        """For each key that several rows have: by the number of the first of these rows, those of all of them."""
        parts: dict[int, list[int]] = {}
        for number, full in enumerate(self._full_keys() if len(self.by_key) < len(self) else ()):
            parts.setdefault(self.by_key[full], []).append(number)
        return {first: rows for first, rows in parts.items() if len(rows) > 1}

    def _full_keys(self) -> list[str]:
        prefixes, keys = self._prefixes, zip(self.provider.tolist(), self.keys, strict=True)
        return [prefixes[provider] + key if key else prefixes[provider][:-1] for provider, key in keys]

    @cached_property
    def _prefixes(self) -> list[str]:
        return [""] if self.bare else [full_key(name, "") + "/" for name in self.providers]

    def find(self, fulls: Iterable[str]) -> tuple[I64, I64]:
        """Find the rows with any of these full keys: two columns, the number of the key and that of the row."""
        firsts = [(i, self.by_key[full]) for i, full in enumerate(fulls) if full in self.by_key]
        found = [(i, row) for i, first in firsts for row in self.parts.get(first, (first,))]
        which, rows = np.array(found, np.int64).reshape(-1, 2).T
        return which, rows

    def of_provider(self, name: str) -> list[int]:
        """The numbers of one provider's rows."""
        if name not in self.providers:
            return []
        return np.flatnonzero(self.provider == self.providers.index(name)).tolist()

    def row(self, i: int) -> Row:
        """The row with this number as an object."""
        return next(self.rows([i]))

    def rows(self, numbers: Sequence[int]) -> Iterator[Row]:
        """The rows with these numbers as objects; many rows at once cost a few microseconds each."""
        chosen = np.asarray(numbers, np.int64)
        begins = zip(*[starts[chosen].tolist() for starts in self.starts], strict=True)
        described = zip(*[getattr(self, name)[chosen].tolist() for name in _NUMBERS], strict=True)
        prefixes, keys, dims, strides = self._prefixes, self.keys, self.dims, self.strides
        for i, (begin, global_begin, place_begin), own in zip(numbers, begins, described, strict=True):
            provider, kind, dtype, record, offset, part, ndim, global_ndim, digest, digested = own
            shape = tuple(dims[begin : begin + ndim].tolist())
            stride = tuple(strides[begin : begin + ndim].tolist())
            key = keys[i]
            global_shape, box, flat = shape, (0,) * ndim, None
            if part != WHOLE:
                global_shape = tuple(self.global_dims[global_begin : global_begin + global_ndim].tolist())
                place = tuple(self.place[place_begin : place_begin + (2 if part == FLAT else global_ndim)].tolist())
                box, flat = (None, place) if part == FLAT else (place, None)
            yield Row(
                key=prefixes[provider] + key if key else prefixes[provider][:-1],
                kind=KINDS[kind],
                dtype=dtypes.ALL[dtype],
                record=record,
                offset=offset,
                shape=shape,
                stride=stride,
                global_shape=global_shape,
                box=box,
                flat=flat,
                digest=digest if digested else None,
            )

    def names_in(self, record: int) -> str:
        """Full keys of at most three rows in a storage record, for an error message about the record."""
        keys = [row.key for row in self.rows(np.flatnonzero(self.record == record)[:3].tolist())]
        return ", ".join(keys) or f"record {record}"

    def repeated(self) -> Iterator[list[Row]]:
        """For each key that several rows have, these rows: the parts of one tensor."""
        repeated = self.parts.values()
        every = self.rows([number for numbers in repeated for number in numbers])  # at once, as there may be many
        return (list(itertools.islice(every, len(numbers))) for numbers in repeated)

    def check(self, record_nbytes: U64) -> None:
        """Check all rows against each other and the records' lengths.

        Raises:
            FormatError: The columns contradict each other, or a row is impossible; the message names the first such
                row's key.
        """
        n = len(self.keys)
        for name in _NUMBERS:
            if (rows := len(getattr(self, name))) != n:
                raise FormatError(f"index: the column {name!r} has {rows} rows instead of {n}")
        lengths = tuple(int(counts.sum()) for counts in self._counts)
        if (len(self.dims), len(self.global_dims), len(self.place)) != lengths or len(self.strides) != lengths[0]:
            raise FormatError("index: the shapes do not match the rows")
        self._refuse(self.provider >= len(self.providers), "names no provider")
        self._refuse(self.kind >= len(KINDS), "is of an unknown array library")
        self._refuse(self.dtype >= len(dtypes.ALL), "is of an unknown element type")
        only_torch = np.array([d.numpy is None for d in dtypes.ALL])[self.dtype]
        self._refuse((self.kind != KINDS.index("torch")) & only_torch, "is of an element type that only torch has")
        no_torch = np.array([not d.in_torch for d in dtypes.ALL])[self.dtype]
        self._refuse((self.kind == KINDS.index("torch")) & no_torch, "is of an element type that torch lacks")
        self._refuse(self.record >= len(record_nbytes), "names no record")
        self._refuse(self.part > FLAT, "is an unknown kind of part")
        self._refuse(self.digested > 1, "has a digest flag that is neither 0 nor 1")
        self._refuse((self.digested == 0) & (self.digest != 0), "has a digest, but its digest flag is 0")
        row = np.repeat(np.arange(n), self.ndim)
        # floating point is exact below 2**53, and a number that would overflow an integer is merely large
        dims, strides = self.dims.astype(np.float64), self.strides.astype(np.float64)
        spans = 1 + np.bincount(row, weights=np.maximum(dims - 1, 0) * strides, minlength=n)
        spans[np.bincount(row, weights=dims == 0, minlength=n) > 0] = 0
        itemsize = np.array([d.itemsize for d in dtypes.ALL], np.float64)[self.dtype]
        space = record_nbytes.astype(np.float64)[self.record] if n else spans
        self._refuse(self.offset.astype(np.float64) + spans * itemsize > space, "reaches beyond its record")
        self._refuse(self.offset % itemsize.astype(np.uint64) != 0, "is not aligned to its element type")
        self._refuse((self.ndim > MAX_NDIM) | (self.global_ndim > MAX_NDIM), "has too many dimensions")
        bounded = np.bincount(row, weights=(dims >= 2**62) | (strides * itemsize[row] >= 2**62), minlength=n) > 0
        large = _products(np.maximum(dims, 1), self.ndim) * itemsize >= 2**62
        self._refuse(bounded | large, "has an impossible shape")
        self._check_parts(row, dims, itemsize)
        if len(set(self.providers)) != len(self.providers):
            raise FormatError("index: two providers have the same name")
        self._refuse_repeats()

    def _refuse_repeats(self) -> None:
        """Raise FormatError if rows of one key are not parts of one tensor."""
        for numbers, (first, *others) in zip(self.parts.values(), self.repeated(), strict=True):
            if (self.part[numbers] == WHOLE).any():
                raise FormatError("index: two rows have the same key")
            if any((row.dtype, row.global_shape) != (first.dtype, first.global_shape) for row in others):
                raise FormatError(f"index: {first.key!r} has parts of different types or shapes")

    def _check_parts(self, row: I64, dims: np.ndarray, itemsize: np.ndarray) -> None:
        """Raise FormatError for parts that do not lie within their logical tensors."""
        n = len(self.keys)
        whole, box, flat = self.part == WHOLE, self.part == BOX, self.part == FLAT
        wrong = (whole & (self.global_ndim != 0)) | (box & (self.global_ndim != self.ndim)) | (flat & (self.ndim != 1))
        self._refuse(wrong, "is a part of another number of dimensions than its tensor")
        starts, _, places = self.starts
        globals_ = self.global_dims.astype(np.float64)
        owner = np.repeat(np.arange(n), self.global_ndim)
        of_box = box[owner]
        begin = self.place.astype(np.float64)[np.repeat(box, self._counts[2])]
        beyond = begin + dims[box[row]] > globals_[of_box]
        self._refuse(np.bincount(owner[of_box], weights=beyond, minlength=n) > 0, "reaches beyond its logical tensor")
        i = np.flatnonzero(flat)
        first, end = self.place[places[i]].astype(np.float64), self.place[places[i] + 1].astype(np.float64)
        total = _products(globals_, self.global_ndim)
        self._refuse(total * itemsize >= 2**62, "is a part of an impossible tensor")
        wrong = np.zeros(n, bool)
        wrong[i] = (end < first) | (end > total[i]) | (end - first != dims[starts[i]])
        self._refuse(wrong, "is not a range of its logical tensor")

    def _refuse(self, bad: np.ndarray[Any, Any], what: str) -> None:
        if bad.any():
            raise FormatError(f"index: {self.keys[int(np.argmax(bad))]!r} {what}")


def _products(numbers: np.ndarray[Any, Any], counts: U8) -> np.ndarray[Any, Any]:
    """The product of each row's ``counts`` numbers; the rows' numbers lie end to end."""
    result = np.ones(len(counts))
    np.multiply.at(result, np.repeat(np.arange(len(counts)), counts), numbers)
    return result


def table_of(providers: Sequence[str], shards: Sequence[tuple[int, Shard]], record: Sequence[int]) -> ShardTable:
    """Make the table of array shards; its digests are unknown, because they need the data.

    Args:
        providers: Names of the providers.
        shards: The array shards, each with its provider's number.
        record: For each shard, the number of the storage record that holds it.
    """
    rows = [s for _, s in shards]
    part = [FLAT if s.flat is not None else WHOLE if s.shape == s.global_shape else BOX for s in rows]
    place = [() if p == WHOLE else s.flat if p == FLAT else s.offset for s, p in zip(rows, part, strict=True)]
    global_shape = [() if p == WHOLE else s.global_shape for s, p in zip(rows, part, strict=True)]

    def flatten(tuples: Sequence[tuple[int, ...] | None]) -> U64:
        return np.array([n for t in tuples if t for n in t], np.uint64)

    return ShardTable(
        providers=tuple(providers),
        provider=np.array([p for p, _ in shards], np.uint32),
        keys=tuple(s.key for s in rows),
        kind=np.array([KINDS.index(s.kind) for s in rows], np.uint8),
        dtype=np.array([dtypes.BY_NAME[s.dtype].code for s in rows if s.dtype], np.uint8),
        record=np.array(record, np.uint32),
        offset=np.array([s.buffer_offset for s in rows], np.uint64),
        part=np.array(part, np.uint8),
        ndim=np.array([len(s.shape) for s in rows], np.uint8),
        dims=flatten([s.shape for s in rows]),
        strides=flatten([s.stride for s in rows]),
        global_ndim=np.array(list(map(len, global_shape)), np.uint8),
        global_dims=flatten(global_shape),
        place=flatten(place),
        digest=np.zeros(len(rows), np.uint32),
        digested=np.zeros(len(rows), np.uint8),
    )
