"""The tier of a directory: renames commit a checkpoint and undo a commit, and locks tell who writes and who reads."""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator

from typing_extensions import override

from datastates._base import log
from datastates._base.cached import cached_property
from datastates._base.process import is_gone, own_name
from datastates.commit import fence, manifest
from datastates.commit.directories import entries, partials
from datastates.commit.names import LOCK, STEP, Writer, as_debris, revisions
from datastates.commit.pending import Pending, is_begun
from datastates.commit.tier import Committed, Tier
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError
from datastates.ranks.polling import slowest, until
from datastates.storage import Lock, folders_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT

_deleting: set[Location] = set()
"""The partial directories that this process is deleting."""
_PATIENCE = 10.0
"""Seconds to wait for another process that commits in the directory. It may have been stopped meanwhile."""
_LOOKS = 8
"""Checkpoints that are known and looked at again at each call."""


class DirectoryTier(Tier):
    """The checkpoints that are directories in one directory. See :class:`Pending` for how one of them appears."""

    def __init__(self, root: Location) -> None:
        """Remember the directory; nothing is read yet. Raises ValueError for an address in a store without folders."""
        folders_of(root)
        super().__init__(root)
        self._found: dict[str, tuple[int, Committed]] = {}
        self._last = ""

    @cached_property
    @override
    def in_memory(self) -> bool:
        return folders_of(self.root).is_in_memory(self.root)

    @override
    def checkpoints(self, *, certain: bool = False, known: bool = False) -> list[Committed]:
        steps = {n: i for n, i in folders_of(self.root).numbers(self.root).items() if STEP.match(n)}
        old = {n: one for n, one in self._found.items() if known and steps.get(n) == one[0]}
        for name in self._turn(old):
            del old[name]
        every = {name: old.get(name) or (steps[name], self._look(name, certain)) for name in sorted(steps)}
        absent = {name: number for name, (number, one) in every.items() if one is None}
        if absent and not known and not absent.items() <= folders_of(self.root).numbers(self.root).items():
            return self.checkpoints(certain=certain)  # a run has deleted one meanwhile, and may have committed a newer
        found = [one for _, one in every.values() if one is not None]
        # no lock, which a fork might find taken: of two threads, the later one decides what is known
        self._found = {n: (i, one) for n, (i, one) in every.items() if one is not None and one.sequence is not None}
        if all(one.sequence is not None for one in found):
            return found
        # the commit made the last change of a folder: it unlinked the lock
        folders = [folders_of(one.path).look(one.path) for one in found]
        return [
            one._replace(changed=folder.changed)
            for one, folder in zip(found, folders, strict=True)
            if folder is not None
        ]

    def _turn(self, old: Iterable[str]) -> list[str]:
        """Some of the names, others at each call: a number of a listing may be given again, and a file be replaced."""
        names = sorted(old)
        begin = next((i for i, name in enumerate(names) if name > self._last), 0)
        chosen = [*names[begin:], *names[:begin]][:_LOOKS]
        self._last = chosen[-1] if chosen else ""
        return chosen

    def _look(self, name: str, certain: bool) -> Committed | None:
        """Look at one checkpoint; None if it is none."""
        entry, match = self.root / name, STEP.match(name)
        assert match is not None
        if (file := manifest.look(entry)) is None:
            if self.is_link(entry):
                _warn_of_link(entry)
            return None
        facts = manifest.Facts()
        try:
            with contextlib.suppress(FormatError):  # reported to whoever opens it, as other errors are
                facts = manifest.facts_of(entry, file.version)
        except CheckpointNotFoundError:  # another process has just deleted it
            return None
        except StorageError:
            if certain:
                raise
        return Committed(facts.sequence, int(match[1]), int(match[2] or 0), facts.attempt, entry, 0, facts.metric)

    @override
    def is_link(self, path: Location) -> bool:
        return folders_of(path).is_link(path)

    @override
    def make(self) -> None:
        folders_of(self.root).make_folder(self.root)

    @override
    def begin_opening(self) -> bytes:
        return fence.DirectoryOpening.begin(self.root).encode()

    @override
    def opening(self, told: bytes) -> fence.DirectoryOpening:
        return fence.DirectoryOpening.decode(self.root, told)

    @override
    def is_taken(self, target: Location) -> bool:
        return folders_of(target).exists(target)

    @override
    def pending(self, target: Location, attempt: str | None = None, mark: bytes | None = None) -> Pending:
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
                return folders_of(path).open_lock(path)
            except StorageError as error:
                if error.errno != errno.ENOENT:  # else a newer run has just taken its place
                    raise
        return folders_of(self.root).open_lock(self.root, write=False)

    @override
    def of_attempt(self, target: Location, attempt: str) -> Location | None:
        for entry in entries(self.root):
            if revisions(target.name).match(entry.name):
                with contextlib.suppress(CheckpointNotFoundError, FormatError):
                    if manifest.open(entry).attempt == attempt:
                        return entry
        return None

    @override
    @contextlib.contextmanager
    def protect(self, path: Location) -> Iterator[None]:
        try:
            file = folders_of(path).open_lock(path / manifest.FILE, write=False)
        except StorageError as error:
            manifest.refuse_missing(path, error)
            raise
        with file:
            if file.hold(shared=True) is False or not file.is_at(path / manifest.FILE):
                raise CheckpointNotFoundError(f"{path} is being deleted")
            yield

    @override
    def remove(self, path: Location) -> bool:
        left = as_debris(path)
        _deleting.add(left)
        try:
            return self._remove(path, left)
        finally:
            _deleting.discard(left)

    def _remove(self, path: Location, left: Location) -> bool:
        store = folders_of(path)
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
        found = partials(self.root, targets)
        is_fenced = fence.fenced(self.root) if found else None
        return [e for e in found if is_fenced is not None and _is_left(e, is_fenced)]

    @override
    def sweep(self, targets: re.Pattern[str] = STEP) -> None:
        for path in self.debris(targets):
            log.warning("removing the debris of an interrupted run: %s", path)
            try:
                _clear(path)
            except StorageError as error:
                if error.errno not in (errno.EACCES, errno.EPERM):
                    raise
                log.warning("it is another user's, and is left: %s", error)


@functools.cache  # once in a process
def _warn_of_link(entry: Location) -> None:
    """Warn of a link named like a checkpoint that leads to none, as when a storage is not mounted."""
    log.warning("%s is passed over: it is a link to %s, where no checkpoint is", entry, folders_of(entry).target(entry))


def _is_left(entry: Location, is_fenced: Callable[[Writer], bool]) -> bool:
    """Whether nobody writes into a partial directory any more. A lock that can be taken does not prove that."""
    if entry in _deleting or is_begun(entry):
        return False
    with _locked(entry) as lock:
        if lock in (_Lock.ABSENT, _Lock.HELD):
            return lock is _Lock.ABSENT
        writers = fence.writers_of(entry)
        if any(map(fence.is_own, writers)):  # this process has given it up
            return True
        if writers and all(is_fenced(one) or one.process == own_name() or is_gone(one.process) for one in writers):
            return True
        return lock is _Lock.FREE and folders_of(entry).has_stood_still(entry)


class _Lock(enum.Enum):
    """The state of a partial directory's lock."""

    FREE = enum.auto()
    HELD = enum.auto()
    UNKNOWN = enum.auto()  # no locks here, or another user's
    ABSENT = enum.auto()  # its process died before it locked it, or during a commit or a deletion


@contextlib.contextmanager
def _locked(entry: Location) -> Iterator[_Lock]:
    """Try to hold a partial directory's lock; yields its state."""
    store, path = folders_of(entry), entry / LOCK
    try:
        try:
            lock = store.open_lock(path)
        except StorageError as error:  # another user's; a lock on NFS alone needs to write
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
            lock = store.open_lock(path, write=False)
    except StorageError as error:
        yield _Lock.ABSENT if error.errno == errno.ENOENT else _Lock.UNKNOWN
        return
    with lock:
        yield {True: _Lock.FREE, False: _Lock.HELD, None: _Lock.UNKNOWN}[lock.hold()]


def _without_manifest(path: Location) -> Location:
    """Undo a commit where a directory cannot be renamed: overlayfs renames none of a lower layer."""
    folders_of(path).remove(path / manifest.FILE)
    folders_of(path).sync_folder(path)
    return path


def _clear(left: Location) -> None:
    """Delete one partial directory, unless a process holds its lock by now."""
    store = folders_of(left)
    with _locked(left) as lock:
        if lock is _Lock.HELD:
            return
        # without a lock file, its process may be about to make that
        if lock is not _Lock.ABSENT or ((names := store.names(left)) and LOCK not in names):
            store.remove_tree(left)
    with contextlib.suppress(StorageError):  # gone, or not empty. FUSE keeps a file that is open under a hidden name
        store.remove_empty(left)
