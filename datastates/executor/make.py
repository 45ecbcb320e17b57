"""Making an executor from settings."""

from __future__ import annotations

from datastates._base.free_memory import host_memory, local_ranks
from datastates.config import IoSettings
from datastates.executor.executor import Executor
from datastates.state import devices

_SHARE = 4
"""The part of the available memory that a host cache of no given size takes, shared by the local ranks."""


def make_executor(settings: IoSettings, nbytes: int | None = None) -> Executor:
    """Make an executor with the host cache that the settings ask for.

    Args:
        settings: Settings of I/O, with the size of the host cache.
        nbytes: Bytes of the state, if known. The host cache is then no larger than the state, but at least two blocks.
    """
    cache = host_memory() // _SHARE // local_ranks() if settings.host_cache == "auto" else settings.host_cache
    if nbytes is not None:
        cache = min(cache, -(-nbytes // settings.block) * settings.block)
    return Executor(settings, max(cache, 2 * settings.block))


def make_small_executor(settings: IoSettings, nbytes: int) -> Executor:
    """Make an executor for reading ``nbytes`` with little memory: its host cache is a few blocks."""
    return make_executor(settings, min(nbytes, (settings.queue_depth + 1) * settings.block))


def prepare(executor: Executor, settings: IoSettings) -> None:
    """Begin to allocate and page-lock the host cache, if CUDA is in use and the settings give a size."""
    device = devices.current_device()
    if device is not None and settings.host_cache != "auto":
        executor.prepare(device, settings.host_cache)
