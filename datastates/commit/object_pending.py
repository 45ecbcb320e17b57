"""Makes a checkpoint appear in a store of objects: its manifest is created once all else is there.

Nothing is overwritten, renamed or copied. The names of its files have that of the attempt, so two writers of one name
write the same bytes. ``manifest.json`` decides: a manifest, or a fence, which says that no checkpoint will be there.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

from datastates.commit import manifest, object_kept, object_trial
from datastates.commit.decision import Patience, decide
from datastates.commit.manifest import FENCE, Manifest
from datastates.commit.names import with_attempt
from datastates.commit.tier import Uncommitted
from datastates.errors import CommitError, DatastatesError, FormatError, StorageError, UncertainError
from datastates.storage import store_of
from datastates.storage.location import Location


class Place(Protocol):
    """What a checkpoint that is being written tells its tier."""

    patience: Patience

    def begun(self, one: ObjectPending) -> None:
        """It is under way."""

    def ended(self, one: ObjectPending, made: Manifest | None = None) -> None:
        """It is under way no more. ``made``: its manifest, if it is committed."""


class ObjectPending(Uncommitted):
    """A checkpoint that is being written into a store of objects.

    Attributes:
        directory: Begins the names of its files: ``target`` with the name of the attempt, or as it is.
    """

    def __init__(
        self,
        place: Place,
        target: Location,
        attempt: str | None = None,
        mark: bytes | None = None,
        arriving: tuple[Location, float] | None = None,
    ) -> None:
        """Choose the names; nothing is made yet. Arguments as for :meth:`Tier.pending`.

        Without a ``mark``, ``target`` is the user's own name, and the checkpoint gets no other. ``arriving``: what
        begins the names of the files in place of what follows from the other arguments, and a time by :func:`now`
        before its key was read. There may have been a fence before.
        """
        self.target = target
        self.attempt = attempt or secrets.token_hex(4)
        own = target if mark is None else target.with_name(f"{target.name}.{self.attempt}")
        self._looked: float | None = None
        self.directory = own
        if arriving is not None:
            self.directory, self._looked = arriving
        self._place = place
        self._is_given = mark is None
        self._is_alone = attempt is None or mark is None  # so that nobody else commits this attempt
        self._files: list[Location] = []
        self._folders: dict[tuple[int, str], Location] = {}  # by the step and the attempt that have made them
        self._begun = self._looked or now()

    @override
    def named(self, name: str) -> Location:
        return self.path(with_attempt(name, self.attempt))

    @override
    def file(self, name: str) -> Location:
        self._files.append(self.named(name))
        return self._files[-1]

    @override
    def kept(self, name: str, step: int, attempt: str) -> Location:
        if (made := (step, attempt)) not in self._folders:
            self._folders[made] = object_kept.folder(self.directory.parent, step, attempt)
        self._files.append(self._folders[made] / name)
        return self._files[-1]

    @override
    def link(self, kept: Location) -> Location:
        object_kept.refuse_ending(kept, self.directory.parent)
        return kept

    @override
    def add(self, name: str, data: bytes) -> Location:
        path = self.file(name)
        try:
            found = decide(path, data, self._place.patience.fence, self._place.patience)
        except UncertainError as error:  # of this file: the checkpoint is certainly not committed
            raise StorageError(error.errno or 0, error.operation, str(path), str(error)) from error
        if found != data:
            raise CommitError(f"{path} was made by another attempt of the same name")
        return path

    @override
    def begin(self) -> ObjectPending:
        self._begun = self._looked or now()
        self._folders.clear()
        self._place.begun(self)
        return self

    @override
    def seal(self) -> None:
        """Do nothing: what a store has answered is durable."""

    @override
    def commit(self, made: Manifest, ready: Callable[[], None] = lambda: None) -> Location:
        if self._is_given:  # an opening has tried it when it began to save
            object_trial.refuse_overwriting(self.directory.parent)
        ready()
        data = manifest.encode(made)
        files, self._files = self._files, []  # nothing is removed before its key was read
        try:
            found, why = self._decided(data)
        except UncertainError:
            raise
        except StorageError:
            self._files = files
            raise
        if found == data or _is_same(found, made):
            self._place.ended(self, made)
            return self.directory
        with contextlib.suppress(FormatError):  # beside a manifest that cannot be read nothing is removed
            named = _named_in(found, self.directory)
            self._files = [file for file in files if file not in named]
        self._is_alone = True  # the key is decided: nobody commits this attempt any more
        raise CommitError(f"{self.directory} is not committed, and never will be: {why}")

    def _decided(self, data: bytes) -> tuple[bytes, str]:
        """The bytes that decide, and why they are not ``data``. Without an answer, nobody is to commit it any more."""
        key, patience = self.directory / manifest.FILE, self._place.patience
        why, found = f"it was begun more than {patience.attempt / 3600:.3g} hours ago", None
        if self._is_in_time():
            try:
                found = decide(key, data, patience.commit, patience, self._is_in_time)
            except UncertainError as error:
                why = f"the store did not tell whether its manifest was made ({error})"
        if found is None:
            try:
                found = decide(key, FENCE, patience.fence, patience)
            except StorageError as error:
                text = (
                    f"{self.directory} may be committed, now or later, or not: {why}. What is listed is whole. If it "
                )
                text += "does not appear, a later run removes its files"
                raise UncertainError(0, "commit", str(self.directory), text) from error
            if found == FENCE:
                return found, why
        if manifest.is_fence(found):
            return found, "a clean-up or another process gave it up first"
        return found, f"{key} is another attempt's"

    def _is_in_time(self) -> bool:
        return now() - self._begun < self._place.patience.attempt

    @override
    def leave(self) -> None:
        self._files.clear()

    @override
    def abandon(self) -> None:
        files, self._files = self._files, []
        # what is left, a later run removes
        with contextlib.suppress(DatastatesError):
            if files and (self._is_alone or manifest.is_fence(self._fenced())):
                store_of(self.directory).discard(files)
        self.close()

    def _fenced(self) -> bytes:
        """Let nobody commit it any more, if that takes one try; returns the bytes that decide."""
        return decide(self.directory / manifest.FILE, FENCE, 0, self._place.patience)

    @override
    def close(self) -> None:
        self._place.ended(self)


def now() -> float:
    """Seconds on a clock that counts a machine's sleep, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_same(found: bytes, made: Manifest) -> bool:
    """Whether a manifest is of the same attempt with the same bytes: another process has committed them."""
    try:
        other = manifest.decode(found, "")
    except FormatError:
        return False
    return (other.step, other.attempt, other.containers) == (made.step, made.attempt, made.containers)


def _named_in(found: bytes, checkpoint: Location) -> set[Location]:
    """The files that a manifest names, which must not be removed; none for a fence."""
    if manifest.is_fence(found):
        return set()
    return {file for file, _ in manifest.files_of(checkpoint, manifest.decode(found, ""))}
