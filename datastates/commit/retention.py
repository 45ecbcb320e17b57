"""Finds and deletes outdated checkpoints, and the debris of interrupted runs, in a directory of checkpoints."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
from collections import Counter
from collections.abc import Iterator

from datastates.commit import fence, health, manifest
from datastates.commit.directories import PARTIAL, STEP, entries
from datastates.commit.newest import in_order
from datastates.commit.pending import LOCK, as_debris
from datastates.errors import FencedError, StorageError
from datastates.storage import store_of
from datastates.storage.location import Location, stem_of_partial
from datastates.storage.store import ABSENT

_log = logging.getLogger("datastates")


def _newest_first(root: Location) -> list[tuple[int, Location]]:
    """Step and path of each committed checkpoint in ``root`` itself, the newest first. Links are left out."""
    return [(step, path) for step, path in reversed(in_order(root, certain=True)) if not store_of(path).is_link(path)]


def superseded(root: Location) -> list[Location]:
    """The committed checkpoints whose step was saved again later, by one that looks whole.

    Raises:
        StorageError: A manifest cannot be read.
    """
    every = _newest_first(root)
    count = Counter(step for step, _ in every)
    again: set[int] = set()
    found = []
    for step, path in every:
        if step in again:
            found.append(path)
        elif count[step] > 1 and health.problem(path) is None:
            again.add(step)
    return found[::-1]


def outdated(root: Location, keep_last: int | None, keep_every: int | None) -> list[Location]:
    """The checkpoints that need not be kept: superseded ones, and those beyond the limits.

    A damaged checkpoint does not count towards ``keep_last``: so many are kept that look whole.

    Args:
        root: The directory of checkpoints.
        keep_last: Number of newest checkpoints to keep; None keeps all.
        keep_every: Checkpoints at multiples of this step are kept, too; None adds none.

    Raises:
        StorageError: A manifest cannot be read, so that the order of the checkpoints is not certain.
    """
    again = superseded(root)
    if keep_last is None:
        return again
    kept, old = 0, []
    for step, path in _newest_first(root):
        if kept == keep_last:
            if path not in again and (keep_every is None or step % keep_every):
                old.append(path)
        elif path not in again and health.problem(path) is None:
            kept += 1
    return [*again, *old[::-1]]


def retain(root: Location, keep_last: int | None, keep_every: int | None) -> None:
    """Delete the checkpoints that :func:`outdated` finds. One that cannot be deleted stays, and is logged."""
    with _warning():
        for path in outdated(root, keep_last, keep_every):
            with _warning():
                remove(path)


@contextlib.contextmanager
def _warning() -> Iterator[None]:
    try:
        yield
    except (OSError, FencedError) as error:
        _log.warning("an old checkpoint could not be deleted: %s", error)


def debris(root: Location, targets: re.Pattern[str] = STEP) -> list[Location]:
    """The debris of interrupted snapshots and deletions: partial directories that no process is writing.

    ``targets`` matches the part of the name before ``.partial-``; the default matches the names of all steps.
    """
    left = (e for e in entries(root) if (m := PARTIAL.match(e.name)) and targets.match(m[1]))
    return [e for e in left if not is_live(e)]


def sweep(root: Location, targets: re.Pattern[str] = STEP) -> None:
    """Delete the debris that :func:`debris` finds, and log each; raises StorageError, except for another user's."""
    for path in debris(root, targets):
        _log.warning("removing what an interrupted run left: %s", path)
        try:
            clear(path)
        except StorageError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
            _log.warning("it is another user's, and is left: %s", error)


def sweep_beside(target: Location) -> None:
    """Delete the debris of interrupted writes of the path ``target``, as :func:`sweep` does."""
    sweep(target.parent, re.compile(re.escape(stem_of_partial(target.name)) + r"\Z"))


def is_live(entry: Location) -> bool:
    """Whether a process is writing into a partial directory. True if its lock cannot be tried."""
    with _unlocked(entry) as unlocked:
        return not unlocked


@contextlib.contextmanager
def _unlocked(entry: Location) -> Iterator[bool]:
    """Try to hold a partial directory's lock; yields whether nobody else holds it, False if that is unknown."""
    store, path = store_of(entry), entry / LOCK
    try:
        try:
            lock = store.open_lock(path)
        except StorageError as error:  # another user's; a lock on NFS alone needs to write
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
            lock = store.open_lock(path, write=False)
    except StorageError as error:
        # absent: its process died before locking it, or during a commit or a deletion; else it may be held
        yield error.errno == errno.ENOENT
        return
    with lock:
        yield lock.hold() is True


def remove(path: Location) -> bool:
    """Delete a checkpoint. A rename first undoes the commit at once, so that nobody sees half a checkpoint.

    Returns:
        False, if a process reads it; then nothing is deleted.

    Raises:
        StorageError: It cannot be deleted. It is no error if it is already gone.
        FencedError: A newer run saves in the directory; nothing is deleted.
    """
    left, store = as_debris(path), store_of(path)
    try:
        with store.open_lock(path / manifest.FILE, write=False) as file:
            if file.hold() is False:
                return False
            fence.refuse_in(path.parent)  # not earlier: a newer run may have used the name again
            try:
                store.rename(path, left)
            except StorageError as error:
                if error.errno != errno.EXDEV:
                    raise
                left = _without_manifest(path)
            else:
                if not file.is_at(left / manifest.FILE):  # it has done so since
                    store.rename(left, path)
                    return True
    except StorageError as error:
        if error.errno in ABSENT:  # another process has deleted it
            return True
        raise
    store.sync_folder(path.parent)
    clear(left)
    return True


def _without_manifest(path: Location) -> Location:
    """Undo a commit where a directory cannot be renamed: overlayfs renames none of a lower layer."""
    store_of(path).remove(path / manifest.FILE)
    store_of(path).sync_folder(path)
    return path


def clear(left: Location) -> None:
    """Delete one partial directory, unless a process holds its lock by now."""
    with _unlocked(left) as unlocked:
        if unlocked:
            store_of(left).remove_tree(left)
