"""How much host memory the default host cache may take."""

from __future__ import annotations

import os

from datastates._base.free_memory import host_memory

_SHARE = 4


def automatic_cache() -> int:
    """The limit in bytes of a host cache with no size given: a quarter of the available memory, shared by local ranks.

    The number of local ranks is ``LOCAL_WORLD_SIZE``, or 1.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return host_memory() // _SHARE // max(1, int(ranks) if ranks.isdecimal() else 1)
