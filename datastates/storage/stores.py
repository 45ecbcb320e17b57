"""Finds the store of a path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial

from datastates._base import faults
from datastates.errors import storage_errors
from datastates.storage.buckets import SCHEMES, every_bucket
from datastates.storage.folders import Folders
from datastates.storage.local import LocalStore
from datastates.storage.location import Location, scheme_of
from datastates.storage.objects import Store


class FaultyStore(LocalStore):
    """A :class:`LocalStore` that passes the fault point ``STAGE.OPERATION`` before each system call."""

    def __init__(self, stage: str) -> None:
        """Make a store; ``stage`` begins the names of its fault points."""
        self._stage = stage

    @contextlib.contextmanager
    def _call(self, operation: str, path: Location, point: str = "") -> Iterator[None]:
        with storage_errors(operation, path):
            faults.hit(f"{self._stage}.{point or operation}", str(path))
            yield


KINDS: dict[str, tuple[Callable[[str], Store], Callable[[str], Store]]] = {
    "": (LocalStore, FaultyStore),
    **dict.fromkeys(SCHEMES, (lambda stage: every_bucket(),) * 2),
}
"""For each scheme of addresses, two kinds of store: for use, and with fault points. Paths have the empty scheme."""

_made = cache(lambda kind, stage: kind(stage))


def register(scheme: str, store: Store) -> None:
    """Let a store serve the addresses of a scheme, ``SCHEME://PLACE/NAME``, in this process.

    Args:
        scheme: The scheme, of two or more letters, such as ``"s3"``.
        store: The store. It is handed locations with the whole address.
    """
    if not scheme or scheme_of(f"{scheme}://") != scheme:
        raise ValueError(f"scheme: {scheme!r} is none: give two or more letters, digits, '+', '-' or '.'")
    KINDS[scheme] = (lambda stage: store,) * 2


def store_of(path: Location, stage: str = "store") -> Store:
    """The store that a location belongs to.

    Args:
        path: The location.
        stage: The first part of the names of the fault points that its system calls pass.

    Raises:
        ValueError: It is an address with a scheme that no store serves, or of a bucket, and obstore is not installed.
    """
    if (kinds := KINDS.get(scheme_of(path))) is None:
        known = ", ".join(f"{scheme}:" for scheme in sorted(KINDS) if scheme) or "none"
        raise ValueError(
            f"path: {path} is an address, and no store is registered for {scheme_of(path)}: (registered: {known}). "
            "Give a path, of local storage or of a mount, or register a store by datastates.storage.register"
        )
    plain, faulty = kinds
    store: Store = _made(faulty if faults.is_armed() else plain, stage)
    return store


def folders_of(path: Location, stage: str = "store") -> Folders:
    """As :func:`store_of`, for what needs folders.

    Raises:
        ValueError: The location is in a store of objects, or in none.
    """
    store = None if scheme_of(path) in SCHEMES else store_of(path, stage)
    if not isinstance(store, Folders):
        raise ValueError(
            f"path: {path} is in a store of objects, and folders are needed here: give a path, of local storage or "
            "of a mount"
        )
    return store


def reader(path: Location) -> Callable[[int, int], bytes]:
    """Return a function that reads ``nbytes`` of a file at ``offset``; see :meth:`Store.read`."""
    return partial(store_of(path).read, path)
