"""Brings a framework's checkpoints to further places, in the background, the newest first."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from typing_extensions import override

from datastates._base import log
from datastates.commit.retention import warning
from datastates.draining import folder
from datastates.draining.copies import Copies, is_there
from datastates.draining.folder import Folder, Kept, outdated
from datastates.draining.rounds import Rounds
from datastates.errors import DatastatesError, FormatError, StorageError
from datastates.kept import TierSettings
from datastates.storage.location import Location

Context = Callable[[], AbstractContextManager[None]]


class FolderDrains:
    """Brings the checkpoints of one framework's object to each of its tiers. Thread-safe.

    What is due follows from what lies in the directory and in the tiers: a later run, or the command ``drain``, goes on
    where this one stopped.
    """

    def __init__(self, tiers: Sequence[TierSettings], is_busy: Callable[[], bool], unwatched: Context) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            tiers: The places, with the checkpoints that each keeps.
            is_busy: Whether a checkpoint is being saved: it comes first.
            unwatched: A context in which looks at files wait for no checkpoint that is being saved.
        """
        self._tiers, self._is_busy, self._unwatched = tiers, is_busy, unwatched
        self._source: _Source | None = None
        self._every: list[FolderDrain] = []

    def add(self, path: Location) -> None:
        """Bring a checkpoint that its framework has just completed, and what earlier runs have left beside it.

        It may lack a last file yet, which its framework writes soon. Never raises.
        """
        if not self._tiers:
            return
        if self._source is None:
            self._source = _Source(path.parent)
            self._every = [FolderDrain(self._source, tier, self._is_busy, self._unwatched) for tier in self._tiers]
        if path.parent != self._source.root:
            log.warning("%s is brought nowhere: only what lies in %s is brought to tiers", path, self._source.root)
            return
        with self._unwatched():
            self._source.add(path)
        for drain in self._every:
            drain.begin()

    def wait(self, timeout: float | None = None) -> bool:
        """As :meth:`Rounds.wait`, for one tier after the other. ``timeout`` holds for each."""
        return all(drain.wait(timeout) for drain in self._every)

    def close(self) -> None:
        """Bring what is due, but do not wait for a place that fails. A later :meth:`add` begins anew."""
        for drain in self._every:
            drain.close()
        self._source, self._every = None, []


class _Source:
    """The checkpoints of a directory that are complete, as their frameworks have told. Thread-safe."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self.first: int | None = None
        """The number of the first checkpoint of this process."""
        self._last = 0
        self._coming: list[Location] = []
        self._files: set[Location] = set()  # which are no folders, with any ending
        self._lock = threading.Lock()

    def add(self, path: Location) -> None:
        with self._lock:
            self._coming.append(path)
        self._look()

    @property
    def waits(self) -> bool:
        """Whether a framework has not completed a checkpoint yet that it told of."""
        return bool(self._coming)

    def every(self) -> list[Folder]:
        """All that are complete; raises StorageError."""
        self._look()
        files = [one for path in sorted(self._files) if (one := folder.found(path)) is not None]
        return [*{one.path: one for one in [*folder.every(self.root), *files]}.values()]

    def _look(self) -> None:
        with self._lock:
            for path in self._coming.copy():
                try:
                    made = folder.record(path, self._last)
                except StorageError as error:
                    self._coming.remove(path)
                    log.warning("%s is brought nowhere: %s", path, error)
                    continue
                if made is not None:
                    self._coming.remove(path)
                    self._files |= {path} if made.is_file else set()
                    self._last = made.number
                    self.first = self.first or made.number


class FolderDrain(Rounds):
    """Brings the checkpoints of a directory to one place. Thread-safe."""

    def __init__(self, source: _Source, tier: TierSettings, is_busy: Callable[[], bool], unwatched: Context) -> None:
        """Prepare; nothing is read or written yet."""
        self._copies, self._source, self._tier = Copies(Location.of(tier.path)), source, tier
        self._unwatched = unwatched
        super().__init__(self._copies.place, is_busy)
        self._above: int | None = None  # the highest number in the place before this run
        self._lost: set[str] = set()  # copies of what is damaged

    def begin(self) -> None:
        """Bring what is due."""
        self._call()

    @override
    def _round(self) -> bool | None:
        with self._unwatched():
            return self._bring_newest()

    def _bring_newest(self) -> bool | None:
        """Bring the newest checkpoint that is due; returns as :meth:`Rounds._round`."""
        is_last, there = self._is_last(), self._copies.every()
        if self._above is None:
            self._above = max((copy.number for copy in there.values()), default=0)
        coming = {self._copies.key_of(one): one for one in self._source.every()}
        due = {key: one for key, one in coming.items() if key not in there and key not in self._lost}
        arriving = [Kept(one.path.name, self._number(one), key) for key, one in due.items()]
        unwanted = {one.key for one in self._outdated([*(copy.kept for copy in there.values()), *arriving])}
        wanted = [one for one in arriving if one.key not in unwanted]
        if not wanted:
            return False if self._source.waits and not is_last else None
        newest = max(wanted, key=lambda one: one.number)
        self._bring(due[newest.key], newest, {one.key for one in wanted})
        return True

    def _number(self, one: Folder) -> int:
        """A checkpoint's number in the place. Those of this run are above what was there, whatever the clock says."""
        first, above = self._source.first, self._above or 0
        return one.number if first is None or one.number < first else one.number + max(0, above + 1 - first)

    def _outdated(self, every: Sequence[Kept]) -> list[Kept]:
        return outdated(every, self._tier.keep_last, self._tier.keep_every)

    def _bring(self, one: Folder, kept: Kept, due: set[str]) -> None:
        try:
            made = self._copies.send(one, kept.number, self._pace_of)
        except DatastatesError as error:
            if not is_there(one):
                log.info("%s was deleted or replaced before it was brought to %s", one.path, self._place)
            elif _is_of(one, error):
                log.error("%s is not brought to %s: %s", one.path, self._place, error)
                self._lost.add(kept.key)
            else:
                raise
            return
        with warning():
            for old in self._outdated([copy.kept for copy in self._copies.every().values()]):
                self._copies.remove(old.key)
            self._copies.sweep(due, made)


def _is_of(one: Folder, error: DatastatesError) -> bool:
    """Whether an error means that a checkpoint is damaged, or has names that no store takes, not that a place fails."""
    if isinstance(error, StorageError):
        is_here = Location(str(error.filename)).is_relative_to(one.path)
        return is_here or error.errno in (errno.EINVAL, errno.ENAMETOOLONG)
    return isinstance(error, FormatError)
