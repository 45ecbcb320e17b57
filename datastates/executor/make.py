"""An executor as the settings want it."""

from __future__ import annotations

from datastates.config import IoSettings
from datastates.executor.cache_size import automatic_cache
from datastates.executor.executor import Executor


def make_executor(settings: IoSettings, nbytes: int | None = None) -> Executor:
    """An executor as set, or with no larger a cache than ``nbytes`` of state need."""
    cache = automatic_cache() if settings.host_cache == "auto" else settings.host_cache
    if nbytes is not None:
        cache = min(cache, -(-nbytes // settings.block) * settings.block)
    return Executor(
        host_cache=max(cache, 2 * settings.block),
        block=settings.block,
        queue_depth=settings.queue_depth,
        io_backend=settings.io_backend,
        direct_io=settings.direct_io,
        io_threads=settings.io_threads,
        device_cache=settings.device_cache,
    )
