"""Makes a checkpoint, a folder or a file appear at once: writes it into a partial directory, then renames it.

A snapshot is written into a directory ``NAME.partial-XXXXXXXX``. Readers ignore it, and its writers hold a lock on a
file in it. The commit writes and syncs ``manifest.json`` there, syncs the directory, renames it to ``NAME``, and syncs
its parent. Once its writers are gone, a partial directory is debris.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
import weakref
from collections.abc import Callable, Iterable

from typing_extensions import override

from datastates.commit import manifest, names, trial
from datastates.commit.manifest import Manifest
from datastates.commit.names import LOCK, UNFINISHED, partial, revisions
from datastates.commit.tier import Uncommitted
from datastates.errors import CheckpointNotFoundError, CommitError, FormatError, StorageError
from datastates.storage import Location, Lock, folders_of

_SHOWN = 3
"""Most names of lost files in a message."""


class Pending(Uncommitted):
    """A checkpoint, a folder or files that are being written into a partial directory.

    The constructor makes no file: :meth:`begin` does.

    Attributes:
        directory: The partial directory for its files.
        shared: Whether other ranks write into the directory, too.
        files: The files of this process.
    """

    def __init__(self, target: Location, attempt: str | None = None, mark: bytes | None = None) -> None:
        """Choose the partial directory, beside ``target``; nothing is made yet.

        ``attempt`` (8 hexadecimal digits) names a directory that the other ranks make and lock, too. If None, the
        directory is this process's alone and gets a random name. The lock file gets a line with ``mark``. None: it
        belongs to no opening, so the folder around it is made if needed.
        """
        self.target = target
        self.attempt = attempt or secrets.token_hex(4)
        self.directory = partial(target, self.attempt)
        self.shared = attempt is not None
        self.files: list[Location] = []
        self._mark = mark
        self._is_ours = True
        self._lock: Lock | None = None  # shows other processes that the writer lives

    @override
    def named(self, name: str) -> Location:
        return self.path(name)

    @override
    def file(self, name: str) -> Location:
        self.files.append(self.path(name))
        return self.files[-1]

    @override
    def link(self, kept: Location) -> Location | None:
        path = self.file(kept.name)
        return path if folders_of(path).link(kept, path) else None

    @override
    def add(self, name: str, data: bytes) -> Location:
        store, path = folders_of(self.directory), self.file(name)
        try:
            store.create(path, data)
        except StorageError as error:
            if error.errno != errno.EEXIST or not self.shared:
                raise
            store.upload(path, iter([data]), len(data))  # in one step: another process may commit the same attempt
        return path

    @override
    def begin(self) -> Pending:
        root, again = self.target.parent, False
        if self._mark is None:
            folders_of(root).make_folder(root)
        while True:
            self._make(again=again)
            again = True
            try:
                if self._hold():
                    return self
            except StorageError as error:
                # another process took the directory for debris before it was locked
                if error.errno != errno.ENOENT or not folders_of(root).is_folder(root):
                    raise
            time.sleep(0.001)  # until the other process has deleted it

    def _make(self, *, again: bool) -> None:
        try:
            folders_of(self.directory).add_folder(self.directory, exist_ok=self.shared or again)
        except StorageError as error:
            self._is_ours = error.errno != errno.EEXIST
            raise

    def _hold(self) -> bool:
        """Lock the existing directory; returns False if another process is deleting it."""
        path = self.directory / LOCK
        lock = folders_of(path).open_lock(path, create=names.line(self._mark))
        if lock.hold(shared=True) is False or not lock.is_at(path):
            return False
        self._lock = lock
        _begun.add(self)
        return True

    @override
    def seal(self) -> None:
        if self.shared:
            folders_of(self.directory).sync_folder(self.directory)

    @override
    def commit(self, made: Manifest, ready: Callable[[], None] = lambda: None) -> Location:
        self.add(manifest.FILE, manifest.encode(made))
        return self.publish([one.file for one in made.containers], ready)

    def publish(self, others: Iterable[str] = (), ready: Callable[[], None] = lambda: None) -> Location:
        """Give the directory its name; ``others`` are files in it. All else is as for :meth:`commit`."""
        store = folders_of(self.directory)
        store.sync_folder(self.directory)
        made = store.look(self.directory)
        if self._mark is None:  # an opening has tried it when it began to save
            trial.refuse_loss_in(self.directory, made)
        path = self._take_name(ready)
        try:
            self._refuse_lost(path, others)
            self._remove_unfinished(path)
            # not earlier: a partial directory without the lock file counts as abandoned
            store.remove(path / LOCK, missing_ok=True, operation="unlock")  # s3fs no longer finds it after the rename
            store.sync_folder(path.parent)
        except StorageError:
            with contextlib.suppress(OSError):  # a failed commit must leave no checkpoint, and touch no other one
                if made is not None and (found := store.look(path)) is not None and found.place == made.place:
                    store.rename(path, self.directory)
            raise
        self.close()
        return path

    def _refuse_lost(self, path: Location, others: Iterable[str]) -> None:
        """Raise StorageError if a file is not in the renamed directory."""
        lost = {*others, *(file.name for file in self.files)}.difference(folders_of(path).names(path))
        if lost and folders_of(path).exists(path):  # else a newer checkpoint's retention has just deleted it
            names = ", ".join(sorted(lost)[:_SHOWN]) + (f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else "")
            text = f"rename {path}: the renamed folder lacks {names}: its file system loses what it was told to sync. "
            raise StorageError(errno.EIO, "rename", str(path), f"{text}Save to another one")

    def _remove_unfinished(self, path: Location) -> None:
        """Remove what processes were writing that copy the same attempt: they find it committed, or are dead."""
        store = folders_of(path)
        for name in store.names(path) if self.shared else ():
            if UNFINISHED.match(name):
                store.remove(path / name, missing_ok=True)

    def _free_name(self, ready: Callable[[], None]) -> Location:
        path = self.target
        if self._mark is not None:
            names = folders_of(path).names(path.parent)
            found = [m for m in map(revisions(path.name).match, names) if m]
            for m in found:
                self._refuse_again(path.with_name(m[0]))
            taken = [int(m[1] or 0) for m in found]
            path = path.with_name(f"{path.name}.r{1 + max(taken)}") if taken else path
        ready()
        return path

    def _refuse_again(self, path: Location) -> None:
        """Raise CommitError if a checkpoint is of this attempt: it was committed before this began."""
        with contextlib.suppress(CheckpointNotFoundError, FormatError):
            if self.shared and manifest.open(path).attempt == self.attempt:
                raise CommitError(f"{path} is this attempt already: another process has committed it")

    def _take_name(self, ready: Callable[[], None]) -> Location:
        path = self._free_name(ready)
        while True:
            try:
                folders_of(path).rename(self.directory, path)
                return path
            except StorageError as error:
                taken, path = path, self._free_name(ready)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or path == taken:
                    raise

    @override
    def leave(self) -> None:
        self.files.clear()

    @override
    def abandon(self) -> None:
        store = folders_of(self.directory)
        if not self.shared:
            self.close()  # first: FUSE keeps a file that is open under a hidden name, and so the directory
            if self._is_ours:
                store.remove_tree(self.directory, tolerant=True)
            return
        for path in self.files:
            with contextlib.suppress(OSError):
                store.remove(path)
        self.close()
        # other ranks may still be writing, or about to begin: the last one to give up removes the directory
        with contextlib.suppress(OSError), store.open_lock(self.directory / LOCK) as lock:
            if lock.hold() is not False and store.names(self.directory) == [LOCK]:
                store.remove_tree(self.directory, tolerant=True)
                lock.close()
                store.remove_empty(self.directory)

    @override
    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        _begun.discard(self)


_begun: weakref.WeakSet[Pending] = weakref.WeakSet()


def is_begun(directory: Location) -> bool:
    """Whether this process itself writes into a partial directory."""
    return any(one.directory == directory for one in list(_begun))


def publish_files(moves: Iterable[tuple[Location, Location]], *, replace: bool) -> None:
    """Give synced files their final names, one after the other, and sync the folders that they are in.

    Args:
        moves: For each file, its present path and its final path.
        replace: Whether to replace a file at a final path. If not, and a file cannot get its name, all of them are
            where they were.

    Raises:
        StorageError: A file could not get its name, or the name may not survive a power failure. With EEXIST, something
            has got the name.
    """
    moved: list[tuple[Location, Location]] = []
    try:
        for written, final in moves:
            store = folders_of(final)
            (store.rename if replace else store.rename_new)(written, final)
            moved.append((written, final))
        for folder in sorted({final.parent for _, final in moved}):
            folders_of(folder).sync_folder(folder)
    except BaseException:
        for written, final in [] if replace else reversed(moved):
            with contextlib.suppress(OSError):  # a failed export must leave no target
                folders_of(final).rename(final, written)
        raise
