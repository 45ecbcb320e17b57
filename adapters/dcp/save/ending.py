"""How a save ends that the ranks make by themselves: all have written, and ``.metadata`` commits it."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import StorageMeta

from datastates._base import files
from datastates.adapters.dcp import metadata_file
from datastates.adapters.dcp.save.global_plan import Agreed
from datastates.adapters.dcp.save.items import Written
from datastates.commit.ballot import Vote
from datastates.commit.ending import Identity, identity_alone
from datastates.errors import CommitError, DatastatesError, StorageError
from datastates.ranks.together import is_told, settle
from datastates.ranks.world import World

IN_FLIGHT = 2
"""Saves that may be under way at once; a further one waits for the first of them."""


@dataclass(slots=True)
class Turn:
    """The place of a save among those of its session: within it the one before has begun, and the next one waits."""

    name: str
    number: int
    before: threading.Event
    after: threading.Event

    def __enter__(self) -> None:
        self.before.wait()

    def __exit__(self, *_: object) -> None:
        self.after.set()


class Order:
    """The last checkpoints that this rank has committed: their numbers, and where they are."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._last: deque[tuple[int, Path]] = deque(maxlen=IN_FLIGHT)

    def is_replaced(self, number: int, directory: Path) -> bool:
        """Whether one of a later call is there already."""
        return any(n > number and place == directory for n, place in self._last)

    def add(self, number: int, directory: Path) -> None:
        """Note that one was committed."""
        self._last.append((number, directory))


_REPLACED, _UNCERTAIN = b"r", b"u"  # what an answer begins with, where it is not that all is well


class DcpEnding:
    """One rank's file of a checkpoint, which ``.metadata`` commits. See :class:`~datastates.commit.ending.Ending`."""

    def __init__(
        self,
        world: World,
        turn: Turn,
        path: Path,
        agreed: Agreed,
        meta: StorageMeta | None,
        order: Order,
        timeout: float,
    ) -> None:
        """End with the other ranks; ``order`` is the coordinator's."""
        self.path = path
        self._name = f"{turn.name}/commit"
        self._number = turn.number
        self._order = order
        self.identity: Identity = identity_alone(world.token(self._name))
        self.committed: float | None = None
        self.written: Written | None = None
        self._world = world
        self._agreed = agreed
        self._meta = meta
        self._timeout = timeout
        self._voted = self._kept = False

    def commit(self, vote: Vote) -> Path:
        """Tell the coordinator where everything is; raises as :func:`~datastates.ranks.together.settle` does."""
        directory = self.path.parent
        files.sync_directory(directory)
        assert self.written is not None
        found = self.written.results(vote.nbytes)
        if not found:  # the checkpoint has no part of this rank
            self.path.unlink()
        uncertain: list[StorageError] = []

        def decide(told: dict[int, bytes]) -> bytes:
            metadata, planned = self._agreed.metadata, self._agreed.items
            assert metadata is not None
            every = [pickle.loads(told[rank]) for rank in sorted(told)]
            if (written := len({result.index for each in every for result in each})) != planned:
                raise CommitError(f"{planned} items were planned, and the ranks have written {written}")
            with self._order.lock:
                replaced = self._order.is_replaced(self._number, directory)
                if not replaced:
                    place = directory / metadata_file.FILE
                    _, error = metadata_file.publish(place, metadata, every, self._meta)
                    if error is not None:
                        uncertain.append(error)
                        return _UNCERTAIN + str(error).encode(errors="replace")
                    self._order.add(self._number, directory)
            self.committed = time.monotonic()
            return _REPLACED if replaced else b""

        self._voted = True
        try:
            answer = settle(self._world, self._name, None, pickle.dumps(found), decide, timeout=self._timeout)
        except DatastatesError as error:
            if self.committed is None and not uncertain and (self._world.rank == 0 or is_told(error)):
                raise
            # not known here, but it may stand: then its files do, too
            self._kept = True
            if self.committed is None and (uncertain or not self._stands()):
                raise
            return directory
        if answer == _REPLACED:
            self.abandon(made=True)
        elif answer:  # it stands, and a power failure may undo that
            self._kept = True
            raise uncertain[0] if uncertain else CommitError(answer[1:].decode())
        return directory

    def _stands(self) -> bool:
        stored = metadata_file.read(self.path.parent / metadata_file.FILE)
        return self.path.name in metadata_file.files(stored)

    def abandon(self, *, made: bool) -> None:
        """Remove the file, unless it is another's or the checkpoint may have become one."""
        if made and not self._kept:
            with contextlib.suppress(OSError):  # its writer's error is what is told
                self.path.unlink()

    def decline(self, error: BaseException) -> None:
        """Tell the other ranks, unless they know."""
        if not self._voted and self._world.size > 1:
            self._voted = True
            with contextlib.suppress(Exception):  # this rank's own error is what is told
                settle(self._world, self._name, error, b"", lambda _: b"", timeout=self._timeout)
