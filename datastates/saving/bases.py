"""The checkpoint that a run's next save is compared with, so that only what differs is captured and written."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from datastates._base import log
from datastates.commit import manifest, trial
from datastates.commit.manifest import named_of
from datastates.config import Settings
from datastates.container.file import Container, open_named, read_index
from datastates.container.index import Index
from datastates.container.partial_records import hashes_of
from datastates.errors import DatastatesError, StorageError, said
from datastates.saving import gate
from datastates.saving.halves import LastHalves
from datastates.saving.stale import Watch
from datastates.storage import Folders, store_of
from datastates.storage.location import Location

NEVER_SAVED = "nothing with hashes was saved before"
_MOST_FAILURES = 2


@dataclass(frozen=True, slots=True)
class Base:
    """A container of a committed checkpoint, as it was when it was written.

    Attributes:
        path: Its path.
        nbytes: Its length.
        index: Its index, with hashes.
        index_crc: CRC-32 of the index, which no other container has.
    """

    path: Location
    nbytes: int
    index: Index
    index_crc: int

    @property
    def step(self) -> int:
        """The step of its checkpoint."""
        return int(self.index.identity["step"])

    def is_there(self) -> bool:
        """Whether this container, and no other one, lies at its path, with its length and index."""
        with contextlib.suppress(DatastatesError, OSError):
            return read_index(self.path, self.nbytes).footer.crc == self.index_crc
        return False


@dataclass(frozen=True, slots=True)
class Newest:
    """What a rank has in the checkpoint that the run has committed or restored last.

    Attributes:
        own: Its container.
        kept: Its kept container; None without one.
    """

    own: Base
    kept: Base | None = None


class Bases:
    """What a rank's next save is compared with, and how it shares bytes with it. Thread-safe.

    It is what this run has written, or has restored: its bytes were right when they were last seen.

    Attributes:
        refused: Why no bytes are shared; empty as long as they may be.
        links: Whether whole files are linked, because ranges of files are not shared there.
        halves: Plans a state in two containers.
        watch: Compares each save with the one before; None where nobody asks for it.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        refused: str = "",
        full_every: int | None,
        watch: Watch | None,
        keeps_watch: bool,
    ) -> None:
        """Begin without a base.

        Args:
            rank: The number of this rank.
            ranks: The number of ranks that save together.
            refused: As the attribute.
            full_every: Each so many saves, and the first one, are written in full; None: none.
            watch: Compares each save with the one before; None: none is needed.
            keeps_watch: Whether it compares them also where no bytes are shared.
        """
        self.refused, self.links = refused, False
        self.halves = LastHalves()
        self.watch, self._keeps_watch = watch, keeps_watch
        self._rank, self._ranks, self._full_every = rank, ranks, full_every
        self._newest: Newest | None = None
        self._restored: Location | None = None  # not opened yet
        self._shared = (full_every or 1) - 1  # saves since the last full one
        self._tried = False
        self._failures = 0

    def next(self, file: Location) -> tuple[Newest | None, str]:
        """What the next save, into a new file, is compared with; without it, why it is written in full."""
        if not (self.refused or self._tried):
            try:
                self.links = not (isinstance(store_of(file), Folders) and trial.shares_ranges(file.parent))
            except StorageError as error:  # the next save tries again
                return None, said(error)
            self._tried = True
        if self.refused:
            return None, self.refused
        path, self._restored = self._restored, None
        if path is not None:
            self._newest = _opened(path, self._rank, self._ranks)
        return (None, NEVER_SAVED) if self._newest is None else (self._newest, "")

    @property
    def is_full(self) -> bool:
        """Whether it is time for a save in full."""
        return self._full_every is not None and self._shared + 1 >= self._full_every

    def committed(self, newest: Newest, *, shares: bool) -> None:
        """Note a save that is committed. ``shares``: it has bytes of another checkpoint."""
        self._newest, self._shared, self._restored = newest, self._shared + 1 if shares else 0, None
        self._failures = 0 if shares else self._failures

    def restored(self, path: Location | None) -> None:
        """Note that the run goes on from a checkpoint; None: it begins to restore, and what it has may be damaged."""
        self._newest, self._restored = None, path

    @property
    def needs_hashes(self) -> bool:
        """Whether saves take hashes."""
        return not self.refused or (self._keeps_watch and self.watch is not None)

    def failed(self, why: str) -> None:
        """Note that the storage has not shared bytes; after two saves in a row, another way is tried, or none."""
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            self._failures = 0
            if self.links:
                self._refuse(why)
            self.links = True

    def _refuse(self, why: str) -> None:
        self.refused = why
        log.warning("incremental: each checkpoint is written in full, as %s", why)


def bases_of(settings: Settings, rank: int, ranks: int) -> Bases | None:
    """The bases of a rank's saves; None where the settings ask for no hashes."""
    asked = settings.on_stale or ("warn" if settings.incremental else "ignore")
    watch = None if asked == "ignore" else Watch(asked)
    if not settings.incremental and watch is None:
        return None
    if watch is not None:
        gate.watch(watch)
    return Bases(
        rank,
        ranks,
        refused="" if settings.incremental else "incremental is not set",
        full_every=settings.full_every,
        watch=watch,
        keeps_watch=settings.on_stale is not None,
    )


def _opened(checkpoint: Location, rank: int, ranks: int) -> Newest | None:
    """What a rank has in a checkpoint of as many ranks, if it has hashes."""
    with contextlib.suppress(DatastatesError, OSError):  # then the next save is a full one
        made = manifest.open(checkpoint)
        bases = [_base(found) for found in open_named(named_of(checkpoint, made, rank))]
        if made.world_size == ranks and all(hashes_of(base.index) is not None for base in bases):
            return Newest(*bases)
    return None


def _base(found: Container) -> Base:
    return Base(found.path, found.nbytes, found.index, found.index_crc)
