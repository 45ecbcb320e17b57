"""Where the arrays lie whose copies on several ranks are compared, and the order of their bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datastates._base.columns import I64, U32, U64
from datastates.commit.replicas import ReplicaDigests
from datastates.executor.executor import ReplicaRanges
from datastates.state.dtypes import BY_NAME
from datastates.state.shards import Shard

_WORD = 8
"""Bytes of a word of a digest. Each run of bytes begins a new word."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaPlan:
    """The replicas of a structure.

    Attributes:
        row: For each digest, the number of its array shard.
        begin, layout: For each digest, as in :class:`~datastates.commit.replicas.ReplicaDigests`.
        range_row: For each range of memory, the number of the array shard that it belongs to.
        offset: For each range, the bytes from the beginning of the array's buffer.
        ranges: The ranges in the form that the executor takes.
        devices: The CUDA devices that the ranges are on.
    """

    row: U32
    begin: U64
    layout: U32
    range_row: I64
    offset: U64
    ranges: ReplicaRanges
    devices: frozenset[int]

    def addresses(self, begins: U64) -> U64:
        """The present address of each range; ``begins`` has the address of each array shard's buffer."""
        return begins[self.range_row] + self.offset

    def digests(self, found: U64) -> ReplicaDigests:
        """The digests for the vote; ``found`` as the executor computed them."""
        return ReplicaDigests(self.row, self.begin, self.layout, found)


def plan_replicas(shards: Sequence[tuple[int, Shard]]) -> ReplicaPlan | None:
    """Plan the digests of replicas; None if there are none.

    Args:
        shards: The array shards, as this rank holds them, each with its number.
    """
    if not shards:
        return None
    layouts, offsets, lengths, positions = zip(*(_runs_of(shard) for _, shard in shards), strict=True)
    counts = [len(o) for o in offsets]
    which = np.repeat(np.arange(len(shards)), counts)
    buffers = [shard.buffer for _, shard in shards if shard.buffer is not None]
    device = np.array([b.device for b in buffers], np.int32)
    eager = np.array([not shard.lazy for _, shard in shards], np.uint8)
    rows = np.array([i for i, _ in shards], np.int64)
    return ReplicaPlan(
        row=rows.astype(np.uint32),
        begin=np.array([shard.part.bounds[0] for _, shard in shards], np.uint64),
        layout=np.array(layouts, np.uint32),
        range_row=rows[which],
        offset=np.concatenate(offsets).astype(np.uint64),
        ranges=ReplicaRanges(
            device=device[which],
            stream=np.array([b.stream for b in buffers], np.uint64)[which],
            nbytes=np.repeat(np.array(lengths, np.uint64), counts),
            position=np.concatenate(positions).astype(np.uint64),
            digest=which.astype(np.uint32),
            eager=eager[which],
            digests=len(shards),
        ),
        devices=frozenset(d for d in device.tolist() if d >= 0),
    )


def _runs_of(shard: Shard) -> tuple[int, I64, int, I64]:
    """Cut an array into runs of bytes in the order of memory.

    Returns:
        A number for that order, as in :attr:`ReplicaPlan.layout`; the offset of each run in the buffer, the length of
        every run in bytes, and the position of each run's first word in the digest.
    """
    assert shard.dtype is not None
    itemsize = BY_NAME[shard.dtype].itemsize
    dims = [(step, d, size) for d, (size, step) in enumerate(zip(shard.shape, shard.stride, strict=True)) if size > 1]
    order = sorted((dim for dim in dims if dim[0]), key=lambda dim: (-dim[0], dim[1]))  # without repeated elements
    run, inner = itemsize, len(order)
    while inner and order[inner - 1][0] * itemsize == run:
        inner -= 1
        run *= order[inner][2]
    offsets = np.zeros(1, np.int64)
    for step, _, size in order[:inner]:
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * step * itemsize).ravel()
    told = [d for _, d, _ in order]
    is_row_major = told == [d for _, d, _ in dims] and (not inner or run % _WORD == 0)
    layout = 0 if is_row_major else 1 + _hash31((told, run if inner else 0))
    positions = np.arange(len(offsets), dtype=np.int64) * -(-run // _WORD)
    return layout, offsets + shard.buffer_offset, run, positions


def _hash31(what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=4).digest(), "little") >> 1


def is_compared(shard: Shard) -> bool:
    """Whether an array's copies on other ranks are to be compared with it."""
    return len(shard.replicas) > 1 and shard.compared and math.prod(shard.shape) > 0
