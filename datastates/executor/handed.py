"""Objects of stores as files of the native core, whose threads ask for the bytes, or hand them over."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from functools import partial

from typing_extensions import Buffer

from datastates import _native
from datastates._base.workers import Workers
from datastates.errors import StorageError, said, storage_errors
from datastates.storage.location import Location
from datastates.storage.objects import Store

_MOST = 1024
"""Most objects that are made at a time: one that waited for others could keep them waiting for blocks of the cache."""


class Handed:
    """An object of a store that the native core reads. Thread-safe.

    Attributes:
        name: Its location as bytes, for errors.
        best_piece: The most bytes that are asked for at once.
        failure: An error of the store, with the lines that raised it; None so far.
    """

    def __init__(self, store: Store, path: Location) -> None:
        """Describe the object at a location of a store."""
        self.name = os.fsencode(str(path))
        self.best_piece = store.traits.best_piece
        self.failure: BaseException | None = None
        self._store, self._path = store, path

    def read_into(self, spans: Sequence[tuple[int, memoryview]]) -> None:
        """As :meth:`Store.read_into`. The memory is valid until this returns or raises."""
        try:
            with storage_errors("read", str(self._path)):
                self._store.read_into(self._path, spans)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # what they hold of the memory
            self.failure = error
            raise


class Uploads:
    """Makes objects of stores of what write jobs hand over, each on a thread. Thread-safe.

    A store gets the bytes as they lie in the blocks of the host cache, which are free again once it has let go of them.
    """

    def __init__(self, block: int, cache: int) -> None:
        """Begin without threads. ``block`` and ``cache`` are the lengths of a block and of the host cache, in bytes."""
        self._block, self._cache = block, cache
        self._workers = Workers("datastates-upload", _MOST)

    def begin(self, store: Store, path: Location, nbytes: int) -> _native.Outlet:
        """Begin to make an object; returns what the job hands its bytes over by.

        Args:
            store: The store of the object.
            path: The object, which must not exist.
            nbytes: Bytes of the arrays in it.

        Raises:
            ThreadStartError: There is no thread for it.
        """
        outlet = _native.Outlet(os.fsencode(str(path)))
        piece = store.traits.best_piece
        # a part of an upload lies in up to three blocks, of which none may be small; and a fourth one must come free.
        # Stores take some thousand parts, so a long object has long ones
        is_small = self._cache < max(4 * self._block, 4 * piece, nbytes // 1000)
        most_copied = self._block if is_small else min(self._block, piece) // 2
        self._workers.do(partial(_upload, store, path, outlet, nbytes, most_copied))
        return outlet

    def close(self) -> None:
        """Wait until all are made or have failed, and free the threads. Idempotent."""
        self._workers.stop()
        self._workers.join()


def _upload(store: Store, path: Location, outlet: _native.Outlet, nbytes: int, most_copied: int) -> None:
    try:
        with storage_errors("write", str(path)):
            sent = _Sent(most_copied, outlet)
            store.upload(path, sent, nbytes)
            _refuse_short(store, path, sent.nbytes)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # what they hold of the memory
        if not isinstance(error, StorageError):
            error = StorageError(0, "write", str(path), f"write {path}: {type(error).__name__}: {said(error)}")
        told = (error.operation, str(error.filename), str(error))
        outlet.fail(error.errno or 0, *map(os.fsencode, told))
    else:
        outlet.finish()


def _refuse_short(store: Store, path: Location, nbytes: int) -> None:
    """Raise StorageError unless an object has the length of what its store was given."""
    if (found := store.length_if_there(path)) != nbytes:
        has = "it is absent" if found is None else f"it has {found}"
        raise StorageError(0, "write", str(path), f"write {path}: the store was given {nbytes} bytes, and {has}")


class _Sent:
    """The pieces that are handed over; of a short one a copy, so that its block is free at once.

    Attributes:
        nbytes: The length of those that were taken.
    """

    def __init__(self, most_copied: int, outlet: _native.Outlet) -> None:
        self.nbytes = 0
        self._most_copied, self._outlet = most_copied, outlet

    def __iter__(self) -> _Sent:
        return self

    def __next__(self) -> Buffer:
        piece = next(self._outlet)
        self.nbytes += len(piece)
        return bytes(piece) if len(piece) <= self._most_copied else piece
