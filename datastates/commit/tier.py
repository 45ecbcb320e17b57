"""The contract of a tier: complete checkpoints in one place. Readers see a checkpoint there, whole, or not at all.

A tier also makes the checkpoints that are pending.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from typing_extensions import override

from datastates.commit import manifest
from datastates.commit.gathering import Gathering
from datastates.commit.manifest import Manifest
from datastates.commit.names import STEP
from datastates.commit.opening import Opening
from datastates.errors import CheckpointNotFoundError
from datastates.storage.location import Location


class Committed(NamedTuple):
    """A committed checkpoint: its identity, which is step and attempt, its place, its age and its metric.

    Attributes:
        sequence: The sequence number in its manifest; 0 in a manifest of format 1, None if the manifest is unreadable.
        step: Its step.
        revision: The revision in its name; 0 if there is none.
        attempt: The name of the attempt that made it; empty if the manifest is unreadable.
        path: The checkpoint.
        changed: When its place was last changed, in nanoseconds by the store's clock; 0 where no manifest in the tier
            is unreadable.
        metric: How good it is, a finite number; None if nobody said so, or if the manifest is unreadable.
    """

    sequence: int | None
    step: int
    revision: int
    attempt: str
    path: Location
    changed: int
    metric: float | None


class Uncommitted(ABC):
    """A checkpoint that is being written. Used by one thread at a time.

    It can be abandoned at any time, also after an interrupt.

    Attributes:
        target: The path that the checkpoint gets, unless it becomes a revision of what is there.
        attempt: The name of the attempt: the same on all ranks, and in no other checkpoint.
        directory: Begins the paths of its files.
    """

    target: Location
    attempt: str
    directory: Location

    @abstractmethod
    def begin(self) -> Uncommitted:
        """Make the place of its files; returns this.

        Raises:
            StorageError: The place could not be made. Abandon this, as after every exception.
        """

    def path(self, name: str) -> Location:
        """The path of a file of any rank."""
        return self.directory / name

    @abstractmethod
    def named(self, name: str) -> Location:
        """The path of a file of any rank. In a store of objects its name gets that of the attempt."""

    @abstractmethod
    def file(self, name: str) -> Location:
        """As :meth:`named`, for a new file of this process."""

    def kept(self, name: str, step: int, attempt: str) -> Location:
        """As :meth:`file`, for a kept container that was made by an attempt of a step.

        In a store of objects it lies where other checkpoints can name it, too, and may be there already. Raises
        StorageError.
        """
        del step, attempt
        return self.file(name)

    @abstractmethod
    def link(self, kept: Location) -> Location | None:
        """Make an earlier checkpoint's kept container one of this checkpoint, without copying it; returns its path.

        None where that is not offered. Raises StorageError where this one cannot be.
        """

    @abstractmethod
    def add(self, name: str, data: bytes) -> Location:
        """Make a small file of this process; returns its path. Raises StorageError."""

    @abstractmethod
    def seal(self) -> None:
        """Make the names of this process's files durable, where another rank commits them; raises StorageError."""

    @abstractmethod
    def commit(self, made: Manifest, ready: Callable[[], None] = lambda: None) -> Location:
        """Make it a checkpoint; returns its path. All its other files must be synced.

        ``ready`` is called when nothing but the name is left to do. What it raises stops the commit.

        Raises:
            UncertainError: The store did not tell. It may be committed, now or later, so nothing of it may be removed.
            StorageError, CommitError: The commit failed; the checkpoint is not committed, and never will be.
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


class Listing(ABC):
    """Lists and protects checkpoints.

    Its methods can be called by several threads and processes at once. They raise StorageError.

    Attributes:
        root: The place of the checkpoints.
        highest: A sequence number that new checkpoints must be above, as far as it is not seen in the place itself.
    """

    highest = 0

    def __init__(self, root: Location) -> None:
        """Remember the place; nothing is read yet."""
        self.root = root

    @abstractmethod
    def checkpoints(self, *, certain: bool = False, known: bool = False) -> list[Committed]:
        """Every committed checkpoint, ordered by path.

        Args:
            certain: Raise StorageError if a manifest is unreadable.
            known: Take over what an earlier call of this object has found, unless the listing shows a change. A changed
                manifest in an old place is then seen a few calls later.
        """

    def copies(self, path: Location) -> list[Location]:
        """A checkpoint that was listed, and its copies in other places: the nearest first."""
        return [path]

    @abstractmethod
    def protect(self, path: Location) -> contextlib.AbstractContextManager[None]:
        """Keep a checkpoint from being deleted until the block ends, if the store lets this process do so.

        Raises:
            CheckpointNotFoundError: ``path`` is no checkpoint, or is being deleted.
        """

    def holds(self, path: Location) -> list[int]:
        """The ranks whose containers of a checkpoint this process can read here; raises as :func:`manifest.open`."""
        return [*range(manifest.open(path).world_size)]

    def sends(self, path: Location) -> list[int]:
        """The ranks whose containers are brought to further tiers from here; raises as :meth:`holds`."""
        return self.holds(path)

    def here(self, path: Location, step: int, attempt: str) -> Location:
        """The path in this process's place of the checkpoint that rank 0 has at ``path``."""
        del step, attempt
        return path

    def gathering(self) -> Gathering | None:
        """Brings containers that a restore needs from other hosts; None where this process reaches the whole place."""
        return None

    def has_seen(self, path: Location) -> bool:
        """Whether this process has seen a checkpoint whole, so that it need not look again."""
        del path
        return False

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


class Tier(Listing):
    """Lists, protects, commits and deletes the checkpoints in one place.

    Attributes:
        root: The place.
        whole: The checkpoints that this process has seen whole; None where their files may change.
        leader: The rank that fences earlier runs in the place and removes what they left.
    """

    whole: set[Location] | None = None
    leader: int = 0

    @property
    def in_memory(self) -> bool:
        """Whether the checkpoints take memory of this host, as on tmpfs, and end with it."""
        return False

    # --- reading

    @override
    def has_seen(self, path: Location) -> bool:
        return self.whole is not None and path in self.whole

    def lies_here(self, path: Location) -> bool:
        """Whether anything of a checkpoint is in the part of the place that is in reach of this process."""
        del path
        return True

    def listed_once(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, the calls of this thread may share one list of the place."""
        return contextlib.nullcontext()

    def hidden(self) -> set[str]:
        """Names in the place that look like checkpoints and are none: of attempts under way, and of deletions."""
        return set()

    def is_link(self, path: Location) -> bool:
        """Whether a checkpoint is a link to one that lies elsewhere."""
        del path
        return False

    @abstractmethod
    def debris(self, targets: re.Pattern[str] = STEP) -> list[Location]:
        """The debris of interrupted snapshots and deletions: what :meth:`sweep` would delete.

        ``targets`` matches the final name; the default matches the names of all steps.
        """

    # --- opening

    @abstractmethod
    def make(self) -> None:
        """Make the place, where it needs to be made."""

    @abstractmethod
    def begin_opening(self) -> bytes:
        """Begin to open the place, on rank 0; returns the argument for :meth:`opening`."""

    @abstractmethod
    def opening(self, told: bytes) -> Opening:
        """The opening that rank 0 has begun, on any rank."""

    # --- writing

    @abstractmethod
    def is_taken(self, target: Location) -> bool:
        """Whether a path is no place for a new checkpoint, as something else is there."""

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
    def committing(self) -> contextlib.AbstractContextManager[None]:
        """Keep others that commit in this place waiting until the block ends, if its store has locks."""

    @abstractmethod
    def of_attempt(self, target: Location, attempt: str) -> Location | None:
        """The checkpoint that an attempt committed at ``target`` or as a revision of it; None without one."""

    def arriving(self, target: Location, attempt: str, mark: bytes) -> Uncommitted | Location:
        """A checkpoint of another tier that is to lie here, too; or its path where it lies here already.

        Arguments as for :meth:`pending`. What an earlier call has begun may go on.
        """
        return self.of_attempt(target, attempt) or self.pending(target, attempt, mark)

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
