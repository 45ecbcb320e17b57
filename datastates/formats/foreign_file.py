"""A file of another format: records, and the tensors in them. Every number is checked before it is used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from datastates.container import checksums
from datastates.container.composed import Composed
from datastates.container.digests import plan_digests
from datastates.container.object_entry import ObjectEntry
from datastates.container.pickle_reader import Trust
from datastates.container.table import MAX_NDIM, Row, ShardTable, table_of
from datastates.errors import FormatError
from datastates.formats.record_file import Record, RecordFile, overlap
from datastates.state import dtypes
from datastates.state.shards import Shard, StoredArray
from datastates.state.strides import row_major, span
from datastates.storage import store_of
from datastates.storage.location import Location

_LARGEST = 2**62
"""No size, in elements or bytes, reaches this."""


def tensor(
    key: str,
    dtype: str,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    *,
    of: Sequence[int] | None = None,
    begin: Sequence[int] | None = None,
    flat: tuple[int, int] | None = None,
    at: int = 0,
) -> Shard:
    """Describe a tensor of a file, or a part of one.

    Args:
        key: Its full key.
        dtype: Its element type.
        shape: The shape of the tensor, or of the part.
        stride: Elements to step along each dimension; None for row-major order.
        of: The shape of the logical tensor; None if the tensor is whole.
        begin: First index of the part in the logical tensor; None for the whole tensor or a flat range.
        flat: First and one past the last element of a flat range.
        at: Bytes from the beginning of the record to the first element.
    """
    shape = tuple(shape)
    offset = None if flat is not None else tuple(begin) if begin is not None else (0,) * len(shape)
    return Shard(
        key=key,
        dtype=dtype,
        kind="torch",
        shape=shape,
        stride=tuple(row_major(shape) if stride is None else stride),
        global_shape=shape if of is None else tuple(of),
        offset=offset,
        flat=flat,
        buffer_offset=at,
    )


def whole(key: str, array: StoredArray) -> Shard:
    """Describe a whole tensor of a file, as ``torch.save`` stored it."""
    return tensor(key, array.dtype, array.shape, array.stride, at=array.begin)


class ForeignFile(RecordFile):
    """A file of another format, as a :class:`~datastates.reading.tensors.TensorFile`.

    Attributes:
        shards: The tensors.
        objects: Its objects that are no tensors.
        metadata: The texts in its header, by name, if it is a file of safetensors.
        composed: Its tensors that consist of others, by full key.
    """

    checked = False
    composed: Mapping[str, Composed] = MappingProxyType({})
    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        path: Location,
        nbytes: int,
        records: Sequence[Record],
        tensors: Sequence[tuple[int, Shard]],
        objects: Sequence[ObjectEntry] = (),
    ) -> None:
        """Check all records and tensors.

        Args:
            path: The file.
            nbytes: Its length.
            records: Its records, in any order.
            tensors: Each tensor, as :func:`tensor` describes it, with the number of its record.
            objects: Its objects that are no tensors.

        Raises:
            FormatError: Records overlap or reach beyond the file, or a tensor is impossible or not within its record;
                the message names the file and the tensor.
        """
        order = sorted(range(len(records)), key=lambda i: (records[i].offset, records[i].nbytes))
        super().__init__(path, nbytes, [records[i] for i in order])
        if overlap(self.records, nbytes):
            raise FormatError(f"{path}: its tensors overlap, or reach beyond its end")
        for number, shard in tensors:
            _check(path, records[number], shard)
        place = {i: number for number, i in enumerate(order)}
        table = table_of([""], [(0, shard) for _, shard in tensors], [place[number] for number, _ in tensors])
        try:
            table = replace(table, keys=table.packed_keys, bare=True)
            table.check(self.record_nbytes)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error
        self.shards = _digested(table, self.records)
        self.objects = objects

    def record_crc(self, record: int) -> int | None:
        """CRC-32 of a whole record; None if it has none."""
        return self.records[record].crc

    def name_record(self, record: int) -> str:
        """Keys of at most three tensors in a record."""
        return self.shards.names_in(record)

    def vet_composed(self, keys: Collection[str], trust: Trust) -> None:
        """Refuse tensors that consist of others, and could not be built: there are none in most files."""

    def build_composed(self, arrays: Mapping[str, object], trust: Trust) -> dict[str, Any]:
        """Build the tensors that consist of others, all of whose arrays are given: there are none in most files."""
        del arrays, trust
        return {}

    def read_row(self, row: Row) -> memoryview:
        """Read the bytes from a row's first element to its last, and verify them if they are a record with a CRC."""
        record = self.records[row.record]
        nbytes = span(row.shape, row.stride) * row.dtype.itemsize
        data = store_of(self.path).read(self.path, record.offset + row.offset, nbytes)
        if record.crc is not None and nbytes == record.nbytes and checksums.crc32(data) != record.crc:
            raise self.corrupt(row.key)
        return memoryview(data)


def _check(path: Location, record: Record, shard: Shard) -> None:
    """Raise FormatError if numbers do not fit a table's columns, or the tensor does not lie within its record."""
    assert shard.dtype is not None
    numbers = (*shard.shape, *shard.stride, *shard.global_shape, *(shard.offset or ()), *(shard.flat or ()))
    sizes = len(shard.shape) <= MAX_NDIM and len(shard.global_shape) <= MAX_NDIM
    if not sizes or any(not 0 <= n < _LARGEST for n in numbers):
        raise FormatError(f"{path}: {shard.key!r} has an impossible shape")
    itemsize = dtypes.BY_NAME[shard.dtype].itemsize
    if shard.buffer_offset + span(shard.shape, shard.stride) * itemsize > record.nbytes:
        raise FormatError(f"{path}: {shard.key!r} reaches beyond its place in the file")


def _digested(table: ShardTable, records: Sequence[Record]) -> ShardTable:
    """The table, with the digest of each tensor that fills a whole record with a checksum."""
    crcs = [record.crc for record in records]
    nbytes = np.array([record.nbytes for record in records], np.uint64)
    zeros = np.zeros(len(records), np.int64)
    plan = plan_digests(table, nbytes, zeros, zeros)
    known = plan.known.copy()
    known[plan.folded] = 0  # they need the data
    known &= np.array([crc is not None for crc in crcs], np.uint8)[table.record]
    digest = plan.contributions(
        np.array([crc or 0 for crc in crcs], np.uint32), np.zeros(len(plan.folded), np.uint32), table
    )
    return replace(table, digest=digest * known, digested=known)
