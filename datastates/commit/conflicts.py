"""Describes, for error messages, why the ranks' parts do not make whole tensors. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from datastates.commit.claims import PRIME, cover
from datastates.container.table import Row, ShardTable
from datastates.errors import rank_names

_SHOWN = 3
_HINT = (
    "; state that ranks hold alike belongs into a ReplicatedProvider, "
    "what differs by rank needs a key of its own or a provider whose class has per_rank = True"
)


def describe_conflicts(tables: Mapping[int, ShardTable]) -> str | None:
    """Describe the tensors that are held twice or only partly, or whose types or shapes differ; None if all is well.

    Args:
        tables: The shard table of each rank's container, by rank.
    """
    held: dict[str, list[tuple[int, Row]]] = {}
    for rank, table in sorted(tables.items()):
        for row in table.rows(range(len(table))):
            held.setdefault(row.key, []).append((rank, row))
    found = [text for key in sorted(held) for text in _of_tensor(key, held[key])]
    if not found:
        return None
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    hint = _HINT if any("both hold" in text or "another's copy" in text for text in found) else ""
    return "; ".join(found[:_SHOWN]) + more + hint


def _of_tensor(key: str, rows: list[tuple[int, Row]]) -> Iterator[str]:
    (rank, first), *others = rows
    for other, row in others:
        if (row.dtype, row.global_shape) != (first.dtype, first.global_shape):
            texts = [f"{r.dtype.name} of shape {r.global_shape} on rank {n}" for n, r in ((rank, first), (other, row))]
            yield f"{key!r} is {' but '.join(texts)}"
            return
    parts = [(r, row.part) for r, row in rows if row.part.numel]
    tiled = sum(cover(key, first.dtype.name, part) for _, part in parts) % PRIME == 0
    # the covers of a tensor that is held twice add up to 0, too: so count its first element
    if tiled and sum(part.has_first for _, part in parts) == 1:
        return
    numel = int(np.prod(first.global_shape, dtype=np.int64))
    runs = sorted(
        (begin, begin + length, r)
        for r, part in parts
        for begin, length in zip(*(column.tolist() for column in part.runs()), strict=True)
    )
    position, last = 0, -1
    for begin, end, r in runs:
        if begin > position:
            break
        if begin < position:
            yield f"{key!r}: ranks {last} and {r} both hold elements {begin} to {min(end, position)}"
            return
        position, last = end, r
    if position < numel:
        until = next((begin for begin, _, _ in runs if begin > position), numel)
        left = [rank for rank, row in rows if not row.part.numel]
        why = f": {rank_names(left)} left them to another's copy, which is not there" if left else ""
        yield f"{key!r}: nobody holds elements {position} to {until} of {numel}{why}"
    elif parts:
        yield f"{key!r}: some ranks hold boxes of it and others flat ranges"
