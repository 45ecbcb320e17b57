"""Which of the ranks that hold a part alike writes it: decided by each of them alone, and by all alike. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def owners(parts: Sequence[tuple[str, int, tuple[int, ...]]]) -> list[int]:
    """The rank that writes each part, such that the ranks of each set of replicas write about as many bytes.

    The largest part goes first, each to the rank with the least so far, ties to the lower rank; each set of replicas is
    taken by itself. So the answer does not depend on the order of ``parts``, nor on parts that other sets hold, and
    no rank of a set writes more than its fair share of the set's bytes and one part.

    Ranks that describe a set's parts alike give the same answer without a word. Those that do not (a key that only some
    of them have, another size) may each think that another writes, or that they do themselves: then the commit
    finds a gap in that tensor or two claims of one range, and fails with its key.

    Args:
        parts: For each part its full key, its size in bytes, and the ranks that hold it alike.

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
        loads = [(0, rank) for rank in ranks]  # ascending, so a heap already
        for i in sorted(members, key=lambda i: (-parts[i][1], parts[i][0])):
            load, rank = loads[0]
            result[i] = rank
            heapq.heapreplace(loads, (load + parts[i][1], rank))
    return result
