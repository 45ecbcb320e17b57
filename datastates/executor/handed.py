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


def hand_over(store: Store, path: Location, nbytes: int, block: int, cache: int) -> _native.Outlet:
    """Begin to make an object of a write job's bytes, on a thread; returns what the job hands them over by.

    The store gets them as they lie in the blocks of the host cache, which are free again once it has let go of them.

    Args:
        store: The store of the object.
        path: The object, which must not exist.
        nbytes: Bytes of the arrays in it.
        block: Length of a block in bytes.
        cache: Length of the host cache in bytes.

    Raises:
        ThreadStartError: There is no thread for it.
    """
    outlet = _native.Outlet(os.fsencode(str(path)))
    piece = store.traits.best_piece
    # a part of an upload lies in up to three blocks, of which none may be small; and a fourth one must come free.
    # Stores take some thousand parts, so a long object has long ones
    is_small = cache < max(4 * block, 4 * piece, nbytes // 1000)
    most_copied = block if is_small else min(block, piece) // 2
    upload = Workers("datastates-upload", 1)
    upload.do(partial(_upload, store, path, outlet, nbytes, most_copied))
    upload.stop()
    return outlet


def _upload(store: Store, path: Location, outlet: _native.Outlet, nbytes: int, most_copied: int) -> None:
    try:
        with storage_errors("write", str(path)):
            sent = _Sent(most_copied, outlet)
            store.upload(path, sent, nbytes)
            _refuse_short(store, path, sent)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # what they hold of the memory
        if not isinstance(error, StorageError):
            error = StorageError(0, "write", str(path), f"write {path}: {type(error).__name__}: {said(error)}")
        told = (error.operation, str(error.filename), str(error))
        outlet.fail(error.errno or 0, *map(os.fsencode, told))
    else:
        outlet.finish()


def _refuse_short(store: Store, path: Location, sent: _Sent) -> None:
    """Raise StorageError unless a store has taken all pieces, and has made an object of their length."""
    taken, found = sent.nbytes, store.length_if_there(path)
    if any(True for _ in sent) or found != taken:
        has = "is absent" if found is None else f"has {found} bytes"
        text = f"write {path}: the store has taken {taken} bytes, not all, or lost some: the object {has}"
        raise StorageError(0, "write", str(path), text)


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
