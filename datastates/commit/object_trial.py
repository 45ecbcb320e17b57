"""Tries whether a store makes an object for one of several callers only, as each commit there needs it."""

from __future__ import annotations

import errno
import secrets
import weakref

from datastates._base.tasks import each
from datastates.errors import StorageError, UncertainError
from datastates.storage import Store, store_of
from datastates.storage.location import Location

_AT_ONCE, _TRIES = 4, 5
_kept: weakref.WeakKeyDictionary[Store, set[Location]] = weakref.WeakKeyDictionary()
"""The places in which this process has tried it."""


def refuse_overwriting(root: Location) -> None:
    """Create one object several times, look at it, and remove it. Once in a process for a place.

    Raises:
        StorageError: The store does not keep its promise, or did not tell, or denied a request.
    """
    store = store_of(root)
    if root in _kept.setdefault(store, set()):
        return
    why = ""
    for _ in range(_TRIES):
        key = root / f".trial-{secrets.token_hex(8)}"
        try:
            what = _broken(store, key)
        except UncertainError as error:
            why = f": {error}"
            continue
        finally:
            store.discard([key])
        if what:
            raise StorageError(
                0,
                "create",
                str(root),
                f"{root}: the store does not keep its promise: {what}. Checkpoints of two runs could be mixed there; "
                "save to a store that honours 'If-None-Match: *', or to a file system, instead",
            )
        _kept[store].add(root)
        return
    text = f"{root}: the store did not tell whether it makes an object once only, in {_TRIES} trials{why}"
    raise StorageError(0, "create", str(root), text)


def _broken(store: Store, key: Location) -> str:
    """What is wrong with a store; empty if nothing is. Raises UncertainError if its answers do not tell."""
    unclear = [UncertainError(0, "create", str(key), f"create {key}: all were refused")]

    def create(number: int) -> bool:
        try:
            store.create(key, b"%d" % number)
        except UncertainError as error:
            unclear.append(error)
            return False
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    made = [*each(create, range(_AT_ONCE), _AT_ONCE), create(_AT_ONCE)]
    if made.count(True) > 1:
        return f"of {len(made)} creates of one object, {made.count(True)} succeeded"
    if len(unclear) > 1 or True not in made:  # an answer was lost
        raise unclear[-1]
    if store.read_all(key) != b"%d" % made.index(True):
        return "an object was replaced by a create that reported to have failed"
    return "" if key.name in store.names(key.parent) else "a list lacks an object that was created"
