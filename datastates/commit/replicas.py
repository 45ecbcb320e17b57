"""Digests of arrays that several ranks hold and one writes, and their comparison. No I/O.

Each rank sends them with its vote; the coordinator compares them before it commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from datastates._base.columns import U32, U64
from datastates.commit.claims import Claims
from datastates.container.table import ShardTable
from datastates.errors import CommitError

_COLUMNS = {"row": "<u4", "begin": "<u8", "layout": "<u4", "digest": "<u8"}
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaDigests:
    """The digests of one rank's replicas: the arrays that other ranks hold as well.

    Attributes:
        row: The number of each array among the rank's claims.
        begin: Position, in the flattened logical tensor, of the first element of the part that the rank holds. It
            tells the parts of one tensor apart.
        layout: A number for the order of the elements in memory: 0 for row-major order. Digests are over the bytes in
            the order of memory, so those of different layouts cannot be compared.
        digest: The digest of the part's bytes, as they were at the snapshot.
    """

    row: U32
    begin: U64
    layout: U32
    digest: U64

    def encode(self) -> dict[str, bytes]:
        """The columns as fields for msgpack."""
        return {c: getattr(self, c).astype(width).tobytes() for c, width in _COLUMNS.items()}

    @classmethod
    def decode(cls, fields: dict[str, bytes]) -> ReplicaDigests:
        """The inverse of :meth:`encode`."""
        return cls(**{c: np.frombuffer(fields[c], width) for c, width in _COLUMNS.items()})


@dataclass(frozen=True, slots=True)
class Difference:
    """Replicas of one part that differ.

    Attributes:
        ranks: Two positions in the list of ranks, ascending.
        rows: On each of these, the number of the array among the rank's claims.
        begin: Position of the part's first element, as in :class:`ReplicaDigests`.
        layout: Whether only the layouts in memory differ, so the contents are not known to.
        more: The number of other logical tensors with such a difference.
    """

    ranks: tuple[int, int]
    rows: tuple[int, int]
    begin: int
    layout: bool
    more: int


def find_difference(claims: Sequence[Claims], replicas: Sequence[ReplicaDigests | None]) -> Difference | None:
    """Compare the replicas of all ranks; None if all copies of each part are equal.

    Args:
        claims: The claims of each rank, in the ranks' order.
        replicas: The digests of each rank, in the same order; None where a rank holds no replica.
    """
    known = [(rank, own) for rank, own in enumerate(replicas) if own is not None and len(own.row)]
    if not known:
        return None
    rank = np.repeat(np.array([r for r, _ in known]), [len(own.row) for _, own in known])
    row = np.concatenate([own.row for _, own in known])
    key = np.concatenate([claims[r].key[own.row] for r, own in known])
    begin, layout, digest = (
        np.concatenate([getattr(own, c) for _, own in known]) for c in ("begin", "layout", "digest")
    )
    order = np.argsort(key + begin * _ODD, kind="stable")  # parts of one key and begin lie together, by rank
    rank, row, key, begin, layout, digest = (c[order] for c in (rank, row, key, begin, layout, digest))
    same = (key[1:] == key[:-1]) & (begin[1:] == begin[:-1])
    moved = layout[1:] != layout[:-1]
    found = np.flatnonzero(same & (moved | (digest[1:] != digest[:-1])))
    if not len(found):
        return None
    # contents that are known to differ tell more than a layout
    at = next((i for i in found.tolist() if not moved[i]), int(found[0]))
    return Difference(
        ranks=(int(rank[at]), int(rank[at + 1])),
        rows=(int(row[at]), int(row[at + 1])),
        begin=int(begin[at]),
        layout=bool(moved[at]),
        more=len(np.unique(key[found])) - 1,
    )


def refuse_difference(
    numbers: Sequence[int],
    claims: Sequence[Claims],
    replicas: Sequence[ReplicaDigests | None],
    table_of: Callable[[int], ShardTable],
) -> None:
    """Raise CommitError if ranks hold different arrays under one key, of which one is written.

    Args:
        numbers: The numbers of the ranks, ascending.
        claims: The claims of each rank, in the same order.
        replicas: The digests of each rank, in the same order; None where a rank holds no replica.
        table_of: Returns the shard table of a rank, by its number. Called only if there is a difference.
    """
    if (found := find_difference(claims, replicas)) is None:
        return
    (a, b), (row, _) = found.ranks, found.rows
    parts = ((c.key == claims[a].key[row]) & (c.begin == found.begin) & (c.end > c.begin) for c in claims)
    writer = next(number for number, held in zip(numbers, parts, strict=True) if held.any())
    key = next(table_of(numbers[a]).rows([row])).key
    raise CommitError(_describe(key, (numbers[a], numbers[b]), writer, found))


def _describe(key: str, ranks: tuple[int, int], writer: int, difference: Difference) -> str:
    a, b = ranks
    more = f", and so do {difference.more} more arrays" if difference.more else ""
    if difference.layout:
        return (
            f"{key!r} lies in memory in another order on rank {b} than on {a}{more}: copies that cannot be compared"
            ". Only one would be written: give them the same strides, for example by contiguous()"
        )
    return (
        f"{key!r} differs between ranks {a} and {b}{more}: only rank {writer} would write its own. "
        "If they should be equal, make them so, as torch.distributed.broadcast does. "
        "What each rank has for itself needs a key of its own or a provider whose class has per_rank = True. "
        "If the lowest rank's is right for all, wrap the provider in ReplicatedProvider(..., compare=False)"
    )
