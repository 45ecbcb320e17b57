"""The catalog of a checkpoint of several containers tells which hold which stretch of each logical tensor. No I/O.

The catalog is sorted by a hash of the keys, and has a checksum for each block. A restoring rank reads only a few blocks
for each tensor that it wants, however many ranks wrote the checkpoint. ``docs/format.md`` specifies the format.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from datastates._base.columns import I64, U32, U64
from datastates.commit.claims import Claims
from datastates.container.checksums import crc32
from datastates.errors import CorruptError, FormatError

FILE = "catalog.bin"
_MAGIC = b"datastates/catalog 01\n\0\0"
_HEADER = struct.Struct("<24sQQQQ")
BLOCK = 1 << 12
"""Bytes under one checksum. A look-up reads at least one block. All ranks read the head: 4 bytes per block."""
_CACHED_BLOCKS = 1 << 14
_MAX_HEAD = 1 << 26
_GUESSES = 8

Read = Callable[[int, int], bytes]
"""Reads (offset, length) of the file."""


class ConflictError(ValueError):
    """Two ranks contradict each other about the tensor of one key, or no rank holds any of its elements."""

    def __init__(self, key: int, ranks: tuple[int, int], what: str = "differ") -> None:
        """Keep the ``key`` (a hash) and the two ``ranks``, the lower first. ``what`` ends the message."""
        self.key, self.ranks = key, (min(ranks), max(ranks))
        super().__init__(f"ranks {self.ranks[0]} and {self.ranks[1]} {what}")


_CONTAINER = np.dtype([("nbytes", "<u8"), ("index_crc", "<u4")])
_TENSOR = np.dtype([("key", "<u8"), ("first", "<u8"), ("digest", "<u4"), ("digested", "|u1")])
_ROW = np.dtype([("begin", "<u8"), ("reach", "<u8"), ("rank", "<u4")])
# records, not columns: so all fields of an entry are together, mostly in one block

Table = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The places of the catalog's tables in its body, computed from the numbers of containers, tensors and rows."""

    containers: int
    tensors: int
    rows: int

    @property
    def places(self) -> dict[np.dtype[Any], tuple[int, int]]:
        """For each kind of record, the offset of its table in the body and the number of its records."""
        tensors = self.containers * _CONTAINER.itemsize
        rows = tensors + self.tensors * _TENSOR.itemsize
        return {_CONTAINER: (0, self.containers), _TENSOR: (tensors, self.tensors), _ROW: (rows, self.rows)}

    @property
    def nbytes(self) -> int:
        """Length of the catalog's body in bytes."""
        at, count = self.places[_ROW]
        return at + count * _ROW.itemsize

    @property
    def blocks(self) -> int:
        """The number of blocks in the catalog's body. The last one may be shorter."""
        return -(-self.nbytes // BLOCK)


def encode_catalog(claims: Sequence[Claims], nbytes: U64, index_crc: U32) -> tuple[bytes, int]:
    """Encode the catalog; returns it and the CRC-32 of its head, which holds the checksums of all the rest.

    Args:
        claims: The claims of each container, in the order of their numbers. The other arguments have the same order.
        nbytes: Length of each container.
        index_crc: CRC-32 of the index of each container.

    Raises:
        ConflictError: Two give different types or shapes for one key, or both hold a tensor's first element, or none
            holds any element of a tensor. It names containers for ranks.
    """
    order, key, starts = _by_key(claims)
    group = np.repeat(np.arange(len(starts), dtype=np.uint32), np.diff(starts, append=len(key)))
    begin, end = (_column(claims, name, order) for name in ("begin", "end"))
    _sort_within(group, order, begin, end)
    rank = np.repeat(np.arange(len(claims), dtype=np.uint32), [len(c) for c in claims])[order]
    form = _column(claims, "form", order)
    _refuse_conflicts(form, key, begin, end, rank, starts[group])
    tensors = key[starts]
    del key, group  # they may have tens of millions of entries
    held = end > begin  # a rank with an empty part knows the tensor, but holds nothing of it
    if len(starts):
        empty = ~np.logical_or.reduceat(held, starts)
        # the sum of covers is 0 here: each replica left the tensor to another
        if len(lost := np.flatnonzero(empty & (form[starts] & 1 == 1))):
            rows = rank[starts[lost[0]] : np.append(starts, len(rank))[lost[0] + 1]]
            raise ConflictError(int(tensors[lost[0]]), (int(rows[0]), int(rows[-1])), "leave it to others")
        held[starts[empty]] = True  # a tensor without elements must be found, too
        counts = np.add.reduceat(held, starts, dtype=np.int64)
        digest = np.bitwise_xor.reduceat(np.where(held, _column(claims, "digest", order), np.uint32(0)), starts)
        digested = np.minimum.reduceat(np.where(held, _column(claims, "digested", order), np.uint8(1)), starts)
    else:
        counts, digest, digested = starts, rank, rank
    first = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    del order, starts, counts, form
    if not held.all():
        begin, end, rank = begin[held], end[held], rank[held]
    return _assemble(
        {
            _CONTAINER: {"nbytes": nbytes, "index_crc": index_crc},
            _TENSOR: {"key": tensors, "first": first[:-1], "digest": digest, "digested": digested},
            _ROW: {"begin": begin, "reach": _running_maximum(end, first), "rank": rank},
        }
    )


def _column(claims: Sequence[Claims], name: str, order: I64) -> Table:
    """One column of all claims, in the given order."""
    return np.concatenate([getattr(c, name) for c in claims])[order]


def _by_key(claims: Sequence[Claims]) -> tuple[I64, U64, I64]:
    """Sort the rows of all claims by key, then by rank: their order, the sorted keys, each tensor's first row."""
    key = np.concatenate([c.key for c in claims])
    order = np.argsort(key, kind="stable")
    key = key[order]
    return order, key, np.flatnonzero(np.concatenate((np.ones(min(1, len(key)), bool), key[1:] != key[:-1])))


def _sort_within(group: U32, order: I64, begin: U64, end: U64) -> None:
    """Sort each tensor's rows by begin, then end, in place. Ties stay in the order of the ranks."""
    behind = (begin[1:] < begin[:-1]) | ((begin[1:] == begin[:-1]) & (end[1:] < end[:-1]))
    wrong = group[1:][behind & (group[1:] == group[:-1])]
    if len(wrong):  # in most tensors the order of the ranks is already the order of their parts
        affected = np.zeros(int(group[-1]) + 1, bool)
        affected[wrong] = True
        rows = np.flatnonzero(affected[group])
        moved = rows[np.lexsort((end[rows], begin[rows], group[rows]))]
        for column in (order, begin, end):
            column[rows] = column[moved]


def _refuse_conflicts(form: U32, key: U64, begin: U64, end: U64, rank: U32, start: I64) -> None:
    """Raise ConflictError if sorted rows contradict each other. ``start``: for each row, its tensor's first row."""
    if len(differing := np.flatnonzero(form != form[start])):
        at = int(differing[0])
        raise ConflictError(int(key[at]), (int(rank[start[at]]), int(rank[at])))
    # covers do not show a tensor that is held twice as a whole; two rows with its first element do
    again = np.flatnonzero((begin[1:] == 0) & (end[1:] > 0) & (key[1:] == key[:-1]) & (end[:-1] > 0) & (form[1:] != 0))
    if len(again):
        at = int(again[0])
        raise ConflictError(int(key[at]), (int(rank[at]), int(rank[at + 1])))


def _assemble(tables: dict[np.dtype[Any], dict[str, Table]]) -> tuple[bytes, int]:
    layout = _Layout(*(len(next(iter(columns.values()))) for columns in tables.values()))
    head = _HEADER.size + 4 * layout.blocks
    data = bytearray(head + layout.nbytes)
    for kind, (at, count) in layout.places.items():
        table = np.frombuffer(data, kind, count, head + at)
        for name, column in tables[kind].items():
            table[name] = column
    body = memoryview(data)[head:]
    checks = [crc32(body[at : at + BLOCK]) for at in range(0, len(body), BLOCK)]
    _HEADER.pack_into(data, 0, _MAGIC, layout.containers, layout.tensors, layout.rows, BLOCK)
    data[_HEADER.size : head] = np.array(checks, "<u4").tobytes()
    return bytes(data), crc32(memoryview(data)[:head])


def _running_maximum(end: U64, first: I64) -> U64:
    """For each row, the highest end among its tensor's rows up to and including it."""
    result = end.copy()
    falls = np.flatnonzero(end[1:] < end[:-1]) + 1
    inner = falls[~np.isin(falls, first)]  # only these: in most tensors the ends ascend
    tensors = np.searchsorted(first, inner, side="right") - 1
    for tensor in tensors[np.diff(tensors, prepend=-1) > 0].tolist():
        rows = slice(int(first[tensor]), int(first[tensor + 1]))
        result[rows] = np.maximum.accumulate(end[rows])
    return result


class Holders(Protocol):
    """Tells which containers hold a tensor or an object, given the hash of its key; as :class:`Catalog` does."""

    def find(self, key: int) -> int | None:
        """A number for the tensor or object; None if there is none."""

    def holders(self, tensor: int, begin: int, end: int) -> list[int]:
        """The numbers of those that may hold elements from ``begin`` to before ``end``."""

    def any_holder(self, tensor: int) -> int | None:
        """The number of the one with its first element; None if none has one."""

    def digest(self, tensor: int) -> int | None:
        """The contributions of all its parts to its digest; None if one is unknown."""

    def keys(self) -> U64:
        """The hashes of all tensors and objects."""


class Catalog:
    """An opened catalog. Reads and verifies each block when it is needed, and caches it. Not thread-safe."""

    def __init__(self, read: Read, file_nbytes: int, head_crc: int, name: str = FILE) -> None:
        """Read and check the head.

        Args:
            read: Reads the file.
            file_nbytes: Length of the file.
            head_crc: The CRC-32 that the head must have.
            name: The file's name in error messages.

        Raises:
            FormatError: The file is no catalog, or its head has another checksum.
        """
        self._read, self._name = read, name
        head = read(0, _HEADER.size) if file_nbytes >= _HEADER.size else b""
        magic, ranks, tensors, rows, block = _HEADER.unpack(head) if head else (b"", 0, 0, 0, 0)
        if magic != _MAGIC or block != BLOCK or max(ranks, tensors, rows) > file_nbytes:
            raise FormatError(f"{name}: not a catalog of this format")
        self._layout = _Layout(ranks, tensors, rows)
        self._body = _HEADER.size + 4 * self._layout.blocks
        if self._body > _MAX_HEAD:
            raise FormatError(f"{name}: the head of the catalog is too long: {self._body} bytes")
        if file_nbytes != self._body + self._layout.nbytes:
            raise FormatError(
                f"{name}: the catalog should have {self._body + self._layout.nbytes} bytes, and has {file_nbytes}"
            )
        head = read(0, self._body)
        if crc32(head) != head_crc:
            raise FormatError(f"{name}: the catalog's head does not match its checksum")
        self._checks = np.frombuffer(head, "<u4", offset=_HEADER.size)
        self._places = self._layout.places
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    @property
    def containers(self) -> int:
        """The number of containers."""
        return self._layout.containers

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        begin = number * BLOCK
        data = self._read(self._body + begin, min(BLOCK, self._layout.nbytes - begin))
        if crc32(data) != int(self._checks[number]):
            text = f"{self._name}: the catalog's block {number} does not match its checksum"
            raise CorruptError(text, key="the catalog", path=self._name)
        self._blocks[number] = data
        if len(self._blocks) > _CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return data

    def _table(self, kind: np.dtype[Any], first: int, last: int) -> Table:
        """The records of one of the catalog's tables, from number ``first`` to before ``last``."""
        place, count = self._places[kind]
        if not 0 <= first <= last <= count:
            raise FormatError(f"{self._name}: the catalog names entries {first} to {last} of {count}")
        begin, end = place + first * kind.itemsize, place + last * kind.itemsize
        parts = [self._block(n) for n in range(begin // BLOCK, -(-end // BLOCK))]
        return np.frombuffer(b"".join(parts)[begin % BLOCK :][: end - begin], kind)

    def _entry(self, kind: np.dtype[Any], name: str, i: int) -> int:
        return int(self._table(kind, i, i + 1)[name][0])

    def _search(self, kind: np.dtype[Any], name: str, low: int, high: int, wanted: int, around: tuple[int, int]) -> int:
        """The first record from ``low`` on whose field ``name`` is at least ``wanted``; ``high`` if none before it is.

        The field ascends, and its values lie in ``around``. The first guesses interpolate, because hashes and the
        bounds of equal parts ascend evenly: that reads fewer blocks than halving does. Later guesses halve.
        """
        below, above = around
        guesses = _GUESSES
        while low < high:
            middle = (low + high) // 2
            if guesses and below < wanted <= above:
                middle = min(low + (wanted - below) * (high - low) // (above - below), high - 1)
                guesses -= 1
            entry = self._entry(kind, name, middle)
            if entry < wanted:
                low, below = middle + 1, entry
            else:
                high, above = middle, entry
        return low

    def _rows(self, tensor: int) -> tuple[int, int]:
        """The number of a tensor's first row, and one past its last."""
        first = self._entry(_TENSOR, "first", tensor)
        is_last = tensor + 1 == self._layout.tensors
        return first, self._layout.rows if is_last else self._entry(_TENSOR, "first", tensor + 1)

    def find(self, key: int) -> int | None:
        """The number of the tensor or object whose key has this hash; None if there is none."""
        count = self._layout.tensors
        at = self._search(_TENSOR, "key", 0, count, key, (0, 1 << 64))
        return at if at < count and self._entry(_TENSOR, "key", at) == key else None

    def holders(self, tensor: int, begin: int, end: int) -> list[int]:
        """All containers, ascending, that may have elements from ``begin`` to before ``end``. Some may have none."""
        first, last = self._rows(tensor)
        numel = self._entry(_ROW, "reach", last - 1) if last > first else 0
        low = self._search(_ROW, "reach", first, last, begin + 1, (0, numel))
        high = self._search(_ROW, "begin", low, last, end, (begin, numel))
        return sorted(set(self._table(_ROW, low, high)["rank"].tolist()))

    def any_holder(self, tensor: int) -> int | None:
        """The container whose part of a tensor or object begins first; None if it has no row."""
        first, last = self._rows(tensor)
        return self._entry(_ROW, "rank", first) if last > first else None

    def digest(self, tensor: int) -> int | None:
        """The digest of a tensor, from the contributions of all its parts; None if a contribution is unknown."""
        known = self._entry(_TENSOR, "digested", tensor)
        return self._entry(_TENSOR, "digest", tensor) if known else None

    def container(self, number: int) -> tuple[int, int]:
        """Length of a container in bytes, 0 if there is none of that number, and the CRC-32 of its index."""
        return self._entry(_CONTAINER, "nbytes", number), self._entry(_CONTAINER, "index_crc", number)

    def keys(self) -> U64:
        """The hashes of all tensors and objects, ascending."""
        return self._table(_TENSOR, 0, self._layout.tensors)["key"]

    def check(self) -> None:
        """Read and verify every block; raises FormatError."""
        for number in range(self._layout.blocks):
            self._block(number)
