"""The contract of a tier: complete checkpoints in one place. Readers see a checkpoint there, whole, or not at all.

A tier also makes the checkpoints that are pending.
"""

from __future__ import annotations

import contextlib
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from datastates.commit import manifest
from datastates.commit.manifest import Manifest
from datastates.commit.names import STEP
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError
from datastates.storage import store_of
from datastates.storage.location import Location

_LOOKS = 8
"""Checkpoints that are known and looked at again at each call."""


class Committed(NamedTuple):
    """A committed checkpoint: its identity, which is step and attempt, its place, and the numbers that tell its age.

    Attributes:
        sequence: The sequence number in its manifest; 0 in a manifest of format 1, None if the manifest is unreadable.
        step: Its step.
        revision: The revision in its name; 0 if there is none.
        attempt: The name of the attempt that made it; empty if the manifest is unreadable.
        path: The checkpoint.
        changed: When its place was last changed, in nanoseconds by the store's clock; 0 where no manifest in the tier
            is unreadable.
    """

    sequence: int | None
    step: int
    revision: int
    attempt: str
    path: Location
    changed: int


class Uncommitted(ABC):
    """A checkpoint that is being written. Used by one thread at a time.

    It can be abandoned at any time, also after an interrupt.

    Attributes:
        target: The path that the checkpoint gets, unless it becomes a revision of what is there.
        attempt: The name of the attempt: the same on all ranks, and in no other checkpoint.
    """

    target: Location
    attempt: str

    @abstractmethod
    def begin(self) -> Uncommitted:
        """Make the place of its files; returns this.

        Raises:
            StorageError: The place could not be made. Abandon this, as after every exception.
        """

    @abstractmethod
    def path(self, name: str) -> Location:
        """The path of a file of any rank."""

    @abstractmethod
    def file(self, name: str) -> Location:
        """The path for a new file of this process."""

    @abstractmethod
    def seal(self) -> None:
        """Make the names of this process's files durable, where another rank commits them; raises StorageError."""

    @abstractmethod
    def commit(self, made: Manifest, ready: Callable[[], None] = lambda: None) -> Location:
        """Make it a checkpoint; returns its path. All its other files must be synced.

        ``ready`` is called when nothing but the name is left to do. What it raises stops the commit.

        Raises:
            StorageError: The commit failed; the checkpoint is not committed.
        """

    @abstractmethod
    def leave(self) -> None:
        """Let :meth:`abandon` leave the files of this process: another rank may still commit them."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove the files of a failed snapshot, as far as possible. The next run removes the rest as debris."""

    @abstractmethod
    def close(self) -> None:
        """Show no longer that the writer lives. Idempotent."""


class ReadableTier:
    """Lists and protects the checkpoints in one place of any store, for readers.

    The store's list and the manifests tell all. Its methods can be called by several threads and processes at once.
    They raise StorageError.

    Attributes:
        root: The place.
    """

    def __init__(self, root: Location) -> None:
        """Remember the place; nothing is read yet."""
        self.root = root
        self._found: dict[str, tuple[int, Committed]] = {}
        self._last = ""

    def checkpoints(self, *, certain: bool = False, known: bool = False) -> list[Committed]:
        """Every committed checkpoint, ordered by path.

        Args:
            certain: Raise StorageError if a manifest is unreadable.
            known: Take over what an earlier call of this object has found, unless the listing shows a change. A changed
                manifest in an old place is then seen a few calls later.
        """
        steps = {n: i for n, i in store_of(self.root).numbers(self.root).items() if STEP.match(n)}
        old = {n: one for n, one in self._found.items() if known and steps.get(n) == one[0]}
        for name in self._turn(old):
            del old[name]
        every = {name: old.get(name) or (steps[name], self._look(name, certain)) for name in sorted(steps)}
        found = [one for _, one in every.values() if one is not None]
        # no lock, which a fork might find taken: of two threads, the later one decides what is known
        self._found = {n: (i, one) for n, (i, one) in every.items() if one is not None and one.sequence is not None}
        if all(one.sequence is not None for one in found):
            return found
        # the commit made the last change of a folder: it unlinked the lock
        folders = [store_of(one.path).look(one.path) for one in found]
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
            return None
        try:
            sequence, attempt = facts_of(entry, file.version)
        except CheckpointNotFoundError:  # another process has just deleted it
            return None
        except StorageError:
            if certain:
                raise
            sequence, attempt = None, ""  # reported to whoever opens it
        return Committed(sequence, int(match[1]), int(match[2] or 0), attempt, entry, 0)

    @contextlib.contextmanager
    def protect(self, path: Location) -> Iterator[None]:
        """Keep a checkpoint from being deleted until the block ends, if the store has locks.

        Raises:
            CheckpointNotFoundError: ``path`` is no checkpoint, or is being deleted.
        """
        if manifest.look(path) is None:
            raise CheckpointNotFoundError(f"{path} is not a committed checkpoint: it has no {manifest.FILE}")
        yield

    def keep(self, find: Callable[[], Location | None], reader: contextlib.ExitStack) -> Location | None:
        """Protect the checkpoint that ``find`` returns until ``reader`` closes.

        If it is deleted before it can be kept, ``find`` is called again. Returns None if ``find`` does.
        """
        while (path := find()) is not None:
            try:
                reader.enter_context(self.protect(path))
                break
            except CheckpointNotFoundError:
                if path == find():
                    raise
        return path

    def debris(self, targets: re.Pattern[str] = STEP) -> list[Location]:
        """The debris of interrupted snapshots and deletions: pending checkpoints that no process writes.

        ``targets`` matches the final name; the default matches the names of all steps.
        """
        del targets
        return []


@functools.lru_cache(maxsize=1 << 16)
def facts_of(path: Location, version: Hashable) -> tuple[int | None, str]:
    """The sequence and the attempt in a manifest. Cached while the file's ``version`` stays the same."""
    del version
    try:
        opened = manifest.open(path)
    except FormatError:
        return None, ""
    return opened.sequence or 0, opened.attempt


class Tier(ReadableTier, ABC):
    """Commits, lists, protects and deletes the checkpoints in one place."""

    # --- writing

    @abstractmethod
    def pending(self, target: Location, attempt: str | None = None, mark: bytes | None = None) -> Uncommitted:
        """A checkpoint that no reader sees until it is committed. Nothing is made yet.

        Args:
            target: The path that it gets.
            attempt: 8 hexadecimal digits: the name of the attempt, in which other ranks write, too. None: a random
                name, of an attempt of this process alone.
            mark: The mark of the opening that it belongs to; None without one. With one, it becomes a revision where
                ``target`` is a checkpoint by then. Without one, the place is made.
        """

    @abstractmethod
    def committing(self) -> AbstractContextManager[None]:
        """Keep others that commit in this place waiting until the block ends, if its store has locks."""

    @abstractmethod
    def of_attempt(self, target: Location, attempt: str) -> Location | None:
        """The checkpoint that an attempt committed at ``target`` or as a revision of it; None without one."""

    # --- deleting

    @abstractmethod
    def remove(self, path: Location) -> bool:
        """Delete a checkpoint. At no time does a reader see half of it.

        Returns:
            False, if a process reads it; then nothing is deleted.

        Raises:
            StorageError: It cannot be deleted. It is no error if it is already gone.
            FencedError: A newer run saves in this place; nothing is deleted.
        """

    @abstractmethod
    def sweep(self, targets: re.Pattern[str] = STEP) -> None:
        """Delete the debris that :meth:`debris` finds, and log each. Another user's debris stays, and is logged."""
