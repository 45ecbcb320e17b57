"""The checkpoint that a run's next save is compared with, so that only what differs is captured and written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from datastates._base import log
from datastates.commit import manifest, newest
from datastates.commit.manifest import named_in
from datastates.commit.tier import Tier
from datastates.config import Settings
from datastates.container.file import open_container, read_index
from datastates.container.index import Index
from datastates.container.partial_records import hashes_of
from datastates.errors import DatastatesError
from datastates.saving import gate
from datastates.saving.stale import Watch
from datastates.storage.location import Location

NEVER_SAVED = "nothing with hashes was saved before"


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


class Bases:
    """The newest base of a run on this rank, and whether saves share bytes with it. For one thread at a time.

    Attributes:
        refused: Why no bytes are shared; empty as long as they may be.
        watch: Compares each save with the one before; None where nobody asks for it.
    """

    def __init__(
        self,
        full_every: int | None,
        find: Callable[[], Location | None],
        *,
        watch: Watch | None = None,
        keeps_watch: bool = False,
    ) -> None:
        """Begin without a base.

        Args:
            full_every: Each so many saves, one is written in full; None: none.
            find: Finds this rank's container in the newest checkpoint that is there already.
            watch: Compares each save with the one before; None: none is needed.
            keeps_watch: Whether it compares them also where no bytes are shared.
        """
        self.refused = ""
        self.watch, self._keeps_watch = watch, keeps_watch
        self._full_every = full_every
        self._find: Callable[[], Location | None] | None = find
        self._newest: Base | None = None
        self._shared = 0  # saves since the last full one

    def next(self) -> tuple[Base | None, str]:
        """The base for the next save; without one, why it is written in full."""
        if self._find is not None:
            find, self._find = self._find, None
            self._newest = self._newest or _loaded(find)
        if self.refused:
            return None, self.refused
        if self._full_every is not None and self._shared + 1 >= self._full_every:
            return None, "full_every"
        return (None, NEVER_SAVED) if self._newest is None else (self._newest, "")

    def committed(self, base: Base, *, shares: bool) -> None:
        """Note a save that is committed. ``shares``: it has bytes of another checkpoint."""
        self._newest, self._shared, self._find = base, self._shared + 1 if shares else 0, None

    @property
    def needs_hashes(self) -> bool:
        """Whether saves take hashes."""
        return not self.refused or (self._keeps_watch and self.watch is not None)

    def refuse(self, why: str) -> None:
        """Note that the storage cannot share bytes; later saves do not try again."""
        self.refused = why
        log.warning("incremental: each checkpoint is written in full, as %s", why)


def bases_of(settings: Settings, tier: Tier, rank: int) -> Bases | None:
    """The bases of a run's saves in a tier; None where the settings ask for no hashes."""
    asked = settings.on_stale or ("warn" if settings.incremental else "ignore")
    watch = None if asked == "ignore" else Watch(asked)
    if not settings.incremental and watch is None:
        return None
    if watch is not None:
        gate.watch(watch)
    bases = Bases(
        settings.full_every,
        partial(_newest_container, tier, rank),
        watch=watch,
        keeps_watch=settings.on_stale is not None,
    )
    bases.refused = "" if settings.incremental else "incremental is not set"
    return bases


def _newest_container(tier: Tier, rank: int) -> Location | None:
    """A rank's container in the newest checkpoint of a tier; None if there is none."""
    every = newest.in_order(tier.checkpoints())
    named = named_in(every[-1].path, manifest.open(every[-1].path)) if every else []
    return named[rank].path if rank < len(named) else None


def _loaded(find: Callable[[], Location | None]) -> Base | None:
    with contextlib.suppress(DatastatesError, OSError):  # then the next save is a full one
        if (path := find()) is not None:
            found = open_container(path)
            if hashes_of(found.index) is not None:
                return Base(path, found.nbytes, found.index, found.index_crc)
    return None
