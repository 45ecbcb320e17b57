"""Finds the store of a path."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from datastates._base import faults
from datastates.storage.faulty import FaultyStore
from datastates.storage.local import LocalStore
from datastates.storage.location import Location, no_store, scheme_of
from datastates.storage.store import Store

KINDS: dict[str, tuple[Callable[[str], Store], Callable[[str], Store]]] = {"": (LocalStore, FaultyStore)}
"""For each scheme of addresses, two kinds of store: for use, and with fault points. Paths have the empty scheme."""

_made = cache(lambda kind, stage: kind(stage))


def store_of(path: Location, stage: str = "store") -> Store:
    """The store that a path belongs to.

    Args:
        path: The path.
        stage: The first part of the names of the fault points that its system calls pass.

    Raises:
        ValueError: The path is an address with a scheme that no store serves.
    """
    if (kinds := KINDS.get(scheme_of(path))) is None:
        raise no_store(path)
    plain, faulty = kinds
    store: Store = _made(faulty if faults.is_armed() else plain, stage)
    return store


def reader(path: Location) -> Callable[[int, int], bytes]:
    """Return a function that reads ``nbytes`` of a file at ``offset``; see :meth:`Store.read`."""
    return partial(store_of(path).read, path)
