"""Digests of logical tensors: CRC-32s that are the same however a tensor was cut into parts, on any ranks.

The digest of a tensor is the CRC-32 of all its bytes. CRC-32 is linear, apart from its begin and end value. So each run
of bytes *contributes* a number of its own: its raw CRC-32, shifted by the number of bytes that follow the run in the
tensor. The digest is the exclusive or of the contributions of all parts, in any order, and of a constant that depends
only on the tensor's length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates._base.columns import I64, U8, U32, U64
from datastates.container import checksums
from datastates.container.digest_runs import Places, places_of
from datastates.container.table import ShardTable, table_of
from datastates.errors import DatastatesError
from datastates.planning.plans import DigestRuns, fields_of
from datastates.state import arrays, memory, strides
from datastates.state.dtypes import BY_NAME
from datastates.state.parts import boxes
from datastates.state.shards import HOST, ArrayRef, Shard
from datastates.state.strides import span

SHORTEST = 64
"""A part of several runs is digested only where its runs have at least so many bytes: shorter ones cost too much."""
_PIECE = 16 << 20
"""Bytes to copy at a time from arrays that do not lie in row-major order in host memory."""


def shift(raw: U32, nbytes: U64) -> U32:
    """Each raw CRC-32, continued over ``nbytes`` more zero bytes."""
    return checksums.crc32_shift(np.ascontiguousarray(raw), np.ascontiguousarray(nbytes))


def constants(nbytes: U64) -> U32:
    """For each length, the constant in the digest of a tensor of so many bytes: the CRC-32 of as many zero bytes."""
    return ~shift(np.full(len(nbytes), 0xFFFFFFFF, np.uint32), nbytes)


def digest_of(contributed: int, nbytes: int) -> int:
    """The digest (CRC-32) of a tensor of ``nbytes`` bytes, from the combined contributions of all its parts."""
    return contributed ^ int(constants(np.array([nbytes], np.uint64))[0])


@dataclass(frozen=True, slots=True, eq=False)
class DigestPlan:
    """A plan to compute the contributions of a table's rows, made before the data is known.

    Attributes:
        known: For each row, 1 where it has a contribution.
        whole: Rows that are one run and a whole record: their contribution comes from the record's CRC-32.
        zeros: For each row in ``whole``, the CRC-32 of as many zero bytes as the row has.
        after: For each row in ``whole``, the number of bytes that follow it in its logical tensor.
        folded: Rows whose contribution is folded from ``runs``: digest ``i`` is the contribution of row ``folded[i]``.
        runs: The stretches of bytes to fold.
    """

    known: U8
    whole: I64
    zeros: U32
    after: U64
    folded: I64
    runs: DigestRuns

    def contributions(self, record_crc: U32, digests: U32, table: ShardTable) -> U32:
        """The contribution of each row, 0 where it has none.

        Args:
            record_crc: CRC-32 of each record.
            digests: The digests folded from ``runs``.
            table: The rows.
        """
        raw = record_crc[table.record[self.whole]] ^ self.zeros
        behind = np.flatnonzero(self.after)
        raw[behind] = shift(raw[behind], self.after[behind])
        result = np.zeros(len(table), np.uint32)
        result[self.whole], result[self.folded] = raw, digests
        return result

    def filled(self, record_crc: U32, digests: U32, table: ShardTable) -> ShardTable:
        """The table with its digests filled in; arguments as for :meth:`contributions`."""
        digest = self.contributions(record_crc, digests, table)
        return replace(table, keys=table.packed_keys, digest=digest, digested=self.known)


def plan_digests(table: ShardTable, record_nbytes: U64, source: I64, begin: I64) -> DigestPlan:
    """Plan the digests of a table's rows: which rows have one, and how it is computed.

    A row has one when its elements lie in the record in row-major order without gaps, and are one run or runs of
    :data:`SHORTEST` bytes or more.

    Args:
        table: The rows, checked.
        record_nbytes: Length of each record in bytes.
        source: For each record, the source that holds it.
        begin: For each record, its offset in that source, in bytes.
    """
    places, record = places_of(table), table.record
    known = places.in_order & (places.is_run | (places.run >= SHORTEST))
    filled = known & (places.nbytes > 0)
    is_record = places.is_run & (places.nbytes == record_nbytes.astype(np.int64)[record])
    whole, folded = np.flatnonzero(filled & is_record), np.flatnonzero(filled & ~is_record)
    return DigestPlan(
        known=known.astype(np.uint8),
        whole=whole,
        zeros=constants(places.nbytes[whole].astype(np.uint64)),
        after=(places.total - places.begin - places.run)[whole].astype(np.uint64),
        folded=folded,
        runs=places.runs(folded, source[record[folded]], begin[record[folded]] + table.offset[folded].astype(np.int64)),
    )


def contribution_of(places: Places, row: int, pieces: Iterable[Any]) -> int:
    """The contribution of one stored part to the digest of its logical tensor.

    Args:
        places: The places of a table's rows.
        row: The number of the part's row.
        pieces: The bytes of the part's elements in row-major order, cut anywhere.
    """
    rows = np.array([row] if places.nbytes[row] else [], np.int64)
    folded = digester(places.runs(rows, np.zeros_like(rows), np.zeros_like(rows)))
    for piece in pieces:
        folded.update(piece)
    return int(np.bitwise_xor.reduce(folded.finish()))


def digester(runs: DigestRuns) -> checksums.Digester:
    """Make a digester for runs that all lie in one source."""
    return checksums.Digester(**fields_of(runs, but=("source",)))


def contribution(shard: Shard) -> int:
    """The contribution of a live part to the digest of its logical tensor; see :func:`contributions`."""
    return next(contributions([shard]))


def contributions(shards: Sequence[Shard]) -> Iterator[int]:
    """The contribution of each live part to the digest of its logical tensor, from its memory as it is now.

    It copies parts on a device, and parts whose memory is not in row-major order, in pieces of some megabytes.

    Raises:
        DatastatesError: A shard is an object, or lies on a device and its ``source`` is not the part itself.
    """
    for shard in shards:
        if shard.is_object:
            raise DatastatesError(f"{shard.key!r} is an object: it has no digest")
    places = places_of(table_of([""], [(0, shard) for shard in shards], [0] * len(shards)))
    for row, shard in enumerate(shards):
        yield contribution_of(places, row, _row_major(shard))


def strided(memory: Any, offset: int, shape: Sequence[int], stride: Sequence[int], itemsize: int) -> Any:
    """A read-only array over elements in memory; ``offset`` is in bytes, ``stride`` in elements, the type is opaque."""
    elements = np.frombuffer(memory, np.dtype(f"V{itemsize}"), span(shape, stride), offset)
    return np.lib.stride_tricks.as_strided(elements, shape, [s * itemsize for s in stride], writeable=False)


def row_major(elements: Any) -> Iterator[Any]:
    """The bytes of a host array in row-major order: in one piece where it is contiguous, else in small copies."""
    if not elements.flags.c_contiguous:
        for piece in _pieces(elements, elements.itemsize):
            yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    elif elements.size:
        yield elements.reshape(-1).view(np.uint8)


def _row_major(shard: Shard) -> Iterator[Any]:
    if shard.buffer is None:  # a restore destination that does not have its memory to itself
        shard = arrays.array_shard(shard.key, shard.source)
    assert shard.dtype is not None
    assert shard.buffer is not None
    buffer, itemsize = shard.buffer, BY_NAME[shard.dtype].itemsize
    if 0 in shard.shape:
        return
    if buffer.device == HOST:
        held = (ctypes.c_char * buffer.nbytes).from_address(buffer.pointer)
        yield from row_major(strided(held, shard.buffer_offset, shard.shape, shard.stride, itemsize))
        return
    source: Any = shard.source
    if arrays.kind_of(source) is None or tuple(source.shape) != shard.shape:
        raise DatastatesError(f"{shard.key!r} lies on a device, and its source is not the part itself")
    for piece in _pieces(source, itemsize):
        shape = tuple(piece.shape)
        ref = ArrayRef(shard.key, shard.kind, shard.dtype, shape, strides.row_major(shape))
        block = memory.allocate(shard.kind, memory.nbytes_of(ref))
        memory.assign(memory.view(block, ref, 0), piece)
        yield np.asarray(block)


def _pieces(array: Any, itemsize: int) -> Iterator[Any]:
    """Cut an array into consecutive parts of at most :data:`_PIECE` bytes, or one element."""
    return (memory.region(array, *box) for box in boxes(array.shape, max(1, _PIECE // itemsize)))
