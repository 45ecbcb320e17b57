"""What each of many ranks holds, as a table of shards and as claims; no tensor is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from datastates.commit.claims import PRIME, Claims, claims_of
from datastates.container import checksums
from datastates.container.index import Index, StoredObject
from datastates.container.records import Records
from datastates.container.table import ShardTable, table_of
from datastates.container.zip_frames import header_nbytes, pickle_place
from datastates.planning import write
from datastates.state.parts import Part
from datastates.state.shards import Shard

NAMES = ("FSDP", "own keys", "ZeRO")
_ROWS = 2
_COLUMNS = 256
_BLOCK = 8 << 20
DTYPE, ITEMSIZE = "bfloat16", 2


@dataclass(frozen=True)
class Layout:
    """How tensors are spread over ranks.

    Attributes:
        name: "FSDP": every rank has some rows of every tensor. "own keys": every rank has tensors of its own, as
            stages of a pipeline and experts have. "ZeRO": every rank has a range of every tensor, flattened; the last
            rank's range is shorter.
        ranks: Number of ranks.
        tensors: Number of shards on each rank.
    """

    name: str
    ranks: int
    tensors: int

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(self.name)

    def shape(self, tensor: int) -> tuple[int, ...]:
        """The shape of a logical tensor."""
        columns = _COLUMNS * (1 + tensor % 4)
        if self.name == "own keys":
            return _ROWS, columns
        # the size of a ZeRO tensor is no multiple of the number of ranks
        return (_ROWS * self.ranks, columns) if self.name == "FSDP" else (self.ranks * _ROWS * columns - 3,)

    def part(self, rank: int, tensor: int) -> Part:
        """The part of a tensor that a rank holds."""
        shape = self.shape(tensor)
        if self.name == "own keys":
            return Part.whole(shape)
        if self.name == "FSDP":
            return Part(shape, (_ROWS, shape[1]), (_ROWS * rank, 0))
        begin, end = self._range(rank, tensor)
        return Part(shape, (end - begin,), None, (begin, end))

    def _range(self, rank: int, tensor: int) -> tuple[int, int]:
        """The first element of a rank's part, and one past its last."""
        numel = math.prod(self.shape(tensor))
        if self.name == "own keys":
            return 0, numel
        length = -(-numel // self.ranks)
        return rank * length, min((rank + 1) * length, numel)

    def table(self, rank: int) -> ShardTable:
        """The table of shards in a rank's container."""
        owner = f"rank{rank}." if self.name == "own keys" else ""
        shards = []
        for tensor in range(self.tensors):
            part = self.part(rank, tensor)
            shards.append(
                Shard(
                    key=f"{owner}layers.{tensor // 10}.mlp.{tensor % 10}.weight",
                    dtype=DTYPE,
                    kind="torch",
                    shape=part.shape,
                    stride=(part.shape[1], 1) if len(part.shape) > 1 else (1,),
                    global_shape=part.global_shape,
                    offset=part.offset,
                    flat=part.flat,
                )
            )
        return table_of(("model",), [(0, shard) for shard in shards], range(self.tensors))

    def index(self, rank: int) -> Index:
        """The index of a rank's container, with one object."""
        table = self.table(rank)
        sizes = np.array([self.part(rank, t).numel * ITEMSIZE for t in range(self.tensors)], np.uint64)
        plan = write.plan_write(sizes, np.zeros(len(sizes), np.uint8), header_nbytes(len(sizes)), _BLOCK)
        begin = pickle_place(plan.end)
        return Index(
            identity={"step": 1, "rank": rank, "world_size": self.ranks, "attempt": "00000000"},
            records=Records.of(plan),
            chunk_crc=np.zeros(len(sizes), np.uint32),
            shards=replace(table, digested=np.ones(len(sizes), np.uint8)),
            objects=(StoredObject(0, "loop", begin, 0, checksums.crc32(b"")),),
            pickle_offset=begin,
            pickle_nbytes=0,
            pickle_crc=checksums.crc32(b""),
        )

    @cached_property
    def _first(self) -> Claims:
        return claims_of(self.table(0))

    @cached_property
    def _lengths(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.array([self._range(0, t)[1] for t in range(self.tensors)], np.uint64)

    @cached_property
    def numels(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Elements of each logical tensor."""
        return np.array([math.prod(self.shape(t)) for t in range(self.tensors)], np.uint64)

    def claims(self, rank: int) -> Claims:
        """A rank's claims, made column by column, as :func:`claims_of` would take minutes for all ranks.

        With "own keys", the hashes of the keys are random. The covers are arbitrary numbers that add up to 0 over all
        ranks, modulo ``PRIME``.
        """
        random = np.random.default_rng(rank)
        own = self.name == "own keys"
        begin = self._lengths * np.uint64(0 if own else rank)
        return Claims(
            key=random.integers(0, 1 << 64, self.tensors, np.uint64) if own else self._first.key,
            form=self._first.form,
            begin=begin,
            end=np.minimum(begin + self._lengths, self.numels),
            digest=random.integers(0, 1 << 32, self.tensors, np.uint32),
            digested=np.ones(self.tensors, np.uint8),
            cover=0 if own else (pow(3, (rank + 1) % self.ranks, PRIME) - pow(3, rank, PRIME)) % PRIME,
        )
