"""How much host memory the default host cache may take."""

from __future__ import annotations

from datastates._base.free_memory import host_memory, local_ranks

_SHARE = 4


def automatic_cache() -> int:
    """The limit in bytes of a cache with no size given: a quarter of the available memory, shared by local ranks."""
    return host_memory() // _SHARE // local_ranks()
