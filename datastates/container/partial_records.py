"""Checksums of a container of which a part lies in another container of the same layout. Pure functions.

CRC-32 is linear: a record's is the exclusive or of those of its chunks, each shifted by the bytes that follow it. So
the record's own need not be read again where few of its chunks have changed.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from datastates._base.columns import I64, U8, U32, Bools
from datastates._base.sizes import CHUNK
from datastates.container.checksums import crc32_shift
from datastates.container.index import Index
from datastates.container.records import Records
from datastates.container.table import ShardTable
from datastates.planning.partial import PartialPlan
from datastates.state.runs import pairs

HASH, HASH_NBYTES = "nh-128", 16
"""The hash of chunks, and its length in bytes. ``docs/format.md`` has it."""


def hashes_of(index: Index) -> U8 | None:
    """The hash of each chunk of a container, a row of 16 bytes each; None without hashes of this kind."""
    if index.hashes is None or index.hashes[0] != HASH:
        return None
    return np.frombuffer(index.hashes[1], np.uint8).reshape(-1, HASH_NBYTES)


def as_hashes(chunks: U8, arrays: int) -> tuple[str, bytes, bytes]:
    """Hashes of chunks in the form that an index has; there are none of the arrays."""
    return HASH, chunks.tobytes(), bytes(HASH_NBYTES * arrays)


def chunk_records(records: Records) -> I64:
    """The number of the record of each chunk, in the order of the file."""
    return np.repeat(np.arange(len(records)), -(-records.nbytes.astype(np.int64) // CHUNK))


def same_places(one: Records, other: Records) -> bool:
    """Whether two containers have their records at the same places."""
    return all(np.array_equal(getattr(one, x), getattr(other, x)) for x in ("header_offset", "data_offset", "nbytes"))


def same_rows(one: ShardTable, other: ShardTable) -> bool:
    """Whether two containers have the same parts of arrays in their records; their names may differ."""
    but = ("keys", "providers", "provider", "kind", "digest", "digested")
    names = [f.name for f in fields(one) if f.name not in but]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def same_arrays(one: ShardTable, other: ShardTable) -> bool:
    """Whether two containers have the same arrays, by name and library, in the same records."""
    named = (tuple(table.keys) + table.providers for table in (one, other))
    columns = ("provider", "kind")
    return (
        same_rows(one, other)
        and next(named) == next(named)
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
    )


def literal_over(literal: bytes | memoryview, partial: PartialPlan, base: Index) -> bytes:
    """The literal bytes of a partial plan, with the share that the unwritten chunks have in each checksum."""
    known = _without(base, partial.written)
    result = np.frombuffer(literal, np.uint8).copy()
    offset, record = partial.patch
    result[offset[:, None] + np.arange(4)] = known[record].astype("<u4").view(np.uint8).reshape(-1, 4)
    return result.tobytes()


def combined(base: Index, written: Bools, crcs: U32) -> tuple[U32, U32]:
    """The checksums of all records and of all chunks.

    Args:
        base: The index of the other container.
        written: For each chunk, whether it is written.
        crcs: The CRC-32 of each chunk that is written.
    """
    chunk_crc = base.chunk_crc.copy()
    chunk_crc[written] = crcs
    return _without(base, written) ^ _share(base, written, crcs), chunk_crc


def _without(base: Index, written: Bools) -> U32:
    """The checksum of each record as if all bits of the chunks that are written were 0 in it."""
    return base.records.crc ^ _share(base, written, base.chunk_crc[written])


def _share(base: Index, written: Bools, crcs: U32) -> U32:
    """The share that chunks have in the checksum of each record."""
    first = base.first_chunk
    record, number = pairs(first[:-1], first[1:])
    record, number = record[written], number[written] - first[:-1][record[written]]
    end = np.minimum((number + 1) * CHUNK, base.records.nbytes.astype(np.int64)[record])
    after = base.records.nbytes.astype(np.int64)[record] - end
    shifted = crcs.copy()
    behind = np.flatnonzero(after)
    shifted[behind] = crc32_shift(crcs[behind], after[behind].astype(np.uint64))
    result = np.zeros(len(base.records), np.uint32)
    np.bitwise_xor.at(result, record, shifted)
    return result
