"""Finds the store of a path."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from datastates._base import faults
from datastates.storage.faulty import FaultyStore
from datastates.storage.local import LocalStore
from datastates.storage.location import Location
from datastates.storage.store import Store

_made = cache(lambda kind, stage: kind(stage))


def store_of(path: Location, stage: str = "store") -> Store:
    """The store that a path belongs to: for every path, the store of file systems.

    Args:
        path: The path.
        stage: The first part of the names of the fault points that its system calls pass.
    """
    del path
    store: Store = _made(FaultyStore if faults.is_armed() else LocalStore, stage)
    return store


def reader(path: Location) -> Callable[[int, int], bytes]:
    """Return a function that reads ``nbytes`` of a file at ``offset``; see :meth:`Store.read`."""
    return partial(store_of(path).read, path)
