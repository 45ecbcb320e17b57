"""Chooses which one of the ranks that hold the same part writes it, without communication. Pure function."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def owners(parts: Sequence[tuple[str, int, tuple[int, ...]]]) -> list[int]:
    """Choose the rank that writes each part, so that the ranks of each set of replicas write about as many bytes.

    Each set of replicas is handled by itself, largest part first. A part goes to the rank with the fewest bytes so far,
    and at a tie to the lower rank. The result therefore depends neither on the order of ``parts`` nor on the parts of
    other sets. No rank of a set writes more than its fair share of the set's bytes plus one part.

    Ranks that describe a set's parts in the same way get the same result. If their descriptions differ (a key that only
    some of them have, or another size), several of them or none may write a part. The commit then finds two claims of
    one range or a gap in a tensor, and fails with its key.

    Args:
        parts: For each part its full key, its size in bytes, and the ranks that hold it.

    Returns:
        The writing rank of each part.

    Raises:
        ValueError: A part is held by no rank.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for i, (key, _, replicas) in enumerate(parts):
        if not replicas:
            raise ValueError(f"{key!r} is held by no rank")
        sets.setdefault(tuple(sorted(replicas)), []).append(i)
    result = [0] * len(parts)
    for ranks, members in sets.items():
        loads = [(0, rank) for rank in ranks]  # an ascending list is a heap
        for i in sorted(members, key=lambda i: (-parts[i][1], parts[i][0])):
            load, rank = loads[0]
            result[i] = rank
            heapq.heapreplace(loads, (load + parts[i][1], rank))
    return result
