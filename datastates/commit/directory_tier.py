"""The tier of a directory: renames commit a checkpoint and undo a commit, and locks tell who writes and who reads."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import re
import time
from collections.abc import Iterator

from typing_extensions import override

from datastates.commit import fence, manifest
from datastates.commit.directories import entries, steps
from datastates.commit.names import PARTIAL, STEP, as_debris, stem_of_partial, step_name
from datastates.commit.pending import LOCK, Pending
from datastates.commit.tier import Committed, Opening, Tier
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError
from datastates.ranks.polling import slowest, until
from datastates.storage import Lock, store_of
from datastates.storage.location import Location
from datastates.storage.store import ABSENT

_log = logging.getLogger("datastates")
_PATIENCE = 10.0
"""Seconds to wait for another process that commits in the directory. It may have been stopped meanwhile."""


class DirectoryTier(Tier):
    """The checkpoints that are directories in one directory. See :class:`Pending` for how one of them appears."""

    @override
    def open(self) -> Opening:
        return fence.DirectoryOpening.begin(self.root)

    @override
    def opening(self, data: bytes) -> Opening:
        return fence.DirectoryOpening.decode(self.root, data)

    @override
    def target(self, step: int, *, in_flight: bool = True) -> Location:
        name = step_name(step)
        there = [e for e in store_of(self.root).names(self.root) if e.startswith(name)]
        names = (m[1] if (m := PARTIAL.match(e)) and in_flight else e for e in there)
        taken = [int(m[2] or 0) for m in map(STEP.match, names) if m and int(m[1]) == step]
        return self.root / (f"{name}.r{1 + max(taken)}" if taken else name)

    @override
    def pending(self, target: Location, attempt: str | None = None, mark: bytes = b"") -> Pending:
        return Pending(target, attempt, mark)

    @override
    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        with self._lock_file() as lock:
            until(lambda: lock.hold() is not False or None, time.monotonic() + _PATIENCE, slowest(1))
            yield

    def _lock_file(self) -> Lock:
        while (path := fence.lock_file(self.root)) != self.root:
            try:
                return store_of(path).open_lock(path)
            except StorageError as error:
                if error.errno != errno.ENOENT:  # else a newer run has just taken its place
                    raise
        return store_of(self.root).open_lock(self.root, write=False)

    @override
    def checkpoints(self, *, certain: bool = False) -> list[Committed]:
        found = []
        for entry in steps(self.root):
            if (match := STEP.match(entry.name)) and (file := manifest.look(entry)) is not None:
                with contextlib.suppress(CheckpointNotFoundError):  # another process has just deleted it
                    if (folder := store_of(entry).look(entry)) is None:
                        continue
                    changed = folder.changed  # the commit made the last change: it unlinked the lock
                    try:
                        sequence = sequence_of(entry, file.version)
                    except StorageError:
                        if certain:
                            raise
                        sequence = None  # reported to whoever opens it
                    found.append(Committed(sequence, int(match[1]), int(match[2] or 0), entry, changed))
        return found

    @override
    def of_attempt(self, target: Location, attempt: str) -> Location | None:
        for entry in entries(self.root):
            if entry.name == target.name or re.fullmatch(re.escape(target.name) + r"\.r[0-9]+", entry.name):
                with contextlib.suppress(CheckpointNotFoundError, FormatError):
                    if manifest.open(entry).attempt == attempt:
                        return entry
        return None

    @override
    @contextlib.contextmanager
    def protect(self, path: Location) -> Iterator[None]:
        try:
            file = store_of(path).open_lock(path / manifest.FILE, write=False)
        except StorageError as error:
            manifest.refuse_missing(path, error)
            raise
        with file:
            if file.hold(shared=True) is False or not file.is_at(path / manifest.FILE):
                raise CheckpointNotFoundError(f"{path} is being deleted")
            yield

    @override
    def remove(self, path: Location) -> bool:
        left, store = as_debris(path), store_of(path)
        try:
            with store.open_lock(path / manifest.FILE, write=False) as file:
                if file.hold() is False:
                    return False
                fence.refuse_in(self.root)  # not earlier: a newer run may have used the name again
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
        store.sync_folder(self.root)
        _clear(left)
        return True

    @override
    def debris(self, targets: re.Pattern[str] = STEP) -> list[Location]:
        left = (e for e in entries(self.root) if (m := PARTIAL.match(e.name)) and targets.match(m[1]))
        return [e for e in left if not is_live(e)]

    @override
    def sweep(self, targets: re.Pattern[str] = STEP) -> None:
        for path in self.debris(targets):
            _log.warning("removing the debris of an interrupted run: %s", path)
            try:
                _clear(path)
            except StorageError as error:
                if error.errno not in (errno.EACCES, errno.EPERM):
                    raise
                _log.warning("it is another user's, and is left: %s", error)


def tier_of(root: Location) -> Tier:
    """The tier of a place: for every path, the tier of directories."""
    return DirectoryTier(root)


def sweep_beside(target: Location) -> None:
    """Delete the debris of interrupted writes of the path ``target``, as :meth:`Tier.sweep` does."""
    tier_of(target.parent).sweep(re.compile(re.escape(stem_of_partial(target.name)) + r"\Z"))


@functools.lru_cache(maxsize=1 << 16)
def sequence_of(path: Location, version: tuple[int, ...]) -> int | None:
    """The sequence number in a manifest. Cached while the file's ``version`` stays the same."""
    del version
    try:
        return manifest.open(path).sequence or 0
    except FormatError:
        return None


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


def _without_manifest(path: Location) -> Location:
    """Undo a commit where a directory cannot be renamed: overlayfs renames none of a lower layer."""
    store_of(path).remove(path / manifest.FILE)
    store_of(path).sync_folder(path)
    return path


def _clear(left: Location) -> None:
    """Delete one partial directory, unless a process holds its lock by now."""
    with _unlocked(left) as unlocked:
        if unlocked:
            store_of(left).remove_tree(left)
