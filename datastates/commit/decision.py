"""Creates the small objects that decide, in a store of objects: of all who want one name, the first decides.

No answer of a store is believed but "made" and a denial. After any other, the name is read: a lost answer to our own
object reads like that of another's, and what was asked for may still be done later.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import NamedTuple

from datastates.errors import StorageError, UncertainError, said, storage_errors
from datastates.storage import store_of
from datastates.storage.location import Location

DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST = 1 << 28


class Patience(NamedTuple):
    """How long a store is asked, in seconds.

    Attributes:
        commit: For the creation of a manifest.
        fence: For that of any other object that decides.
        pause: Between the first two tries; later ones are doubled.
        longest: The longest pause.
        attempt: From the begin of a checkpoint to the last try to commit it: less than a clean-up waits.
    """

    commit: float = 120.0
    fence: float = 60.0
    pause: float = 0.1
    longest: float = 2.0
    attempt: float = 12 * 3600.0


def decide(
    path: Location, data: bytes, seconds: float, patience: Patience, may: Callable[[], bool] = lambda: True
) -> bytes:
    """Create an object where nothing is; returns the bytes that lie there for good: these, or another's.

    Args:
        path: Its location.
        data: Its bytes.
        seconds: How long to try.
        patience: The pauses.
        may: Asked before each try but the first.

    Raises:
        UncertainError: The store did not tell in time, or ``may`` forbade another try. It may be there, or come later.
        StorageError: The store denied it, and nothing was made.
    """
    store, end, pause, asked = store_of(path), time.monotonic() + seconds, patience.pause, False
    while True:
        try:
            with storage_errors("create", str(path)):
                store.create(path, data)
            return data
        except NotImplementedError as error:  # a store to read from
            raise StorageError(errno.ENOSYS, "create", str(path)) from error
        except Exception as error:  # a store that raises another error has not told, either
            if isinstance(error, StorageError) and error.errno in DENIED and not asked:
                raise
            asked, last = True, error
        if (found := _read(path)) is not None:
            return found
        if time.monotonic() >= end or not may():
            number = last.errno or 0 if isinstance(last, StorageError) else 0
            raise UncertainError(number, "create", str(path), said(last) or type(last).__name__) from last
        time.sleep(pause)
        pause = min(2 * pause, patience.longest)


def _read(path: Location) -> bytes | None:
    """The bytes of an object; None if it is absent, or the store does not answer."""
    try:
        return store_of(path).read_all(path, _MOST)
    except Exception:  # as above
        return None
