"""The end of an ``async_save``, without collectives: all ranks have written, then ``.metadata`` commits."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import StorageMeta
from typing_extensions import override

from datastates._base.waiting import Flag
from datastates._base.workers import Work
from datastates.adapters.dcp import metadata_file
from datastates.adapters.dcp.save.global_plan import Agreed
from datastates.adapters.dcp.save.items import Written
from datastates.errors import CommitError, DatastatesError, StorageError
from datastates.files.boxes import AgreedFile
from datastates.ranks.world import World, is_told, settle
from datastates.storage import Location, store_of

IN_FLIGHT = 2
"""Saves that may be under way at once; a further save waits for the oldest."""


@dataclass(eq=False)
class Turn:
    """A save's turn in its session. Entering waits until the save before has begun; leaving lets the next begin.

    Dropping the turn lets the next begin, too, for a call that was interrupted before anybody had it.
    """

    name: str
    number: int
    before: Flag
    after: Flag

    def __post_init__(self) -> None:
        """Prepare to leave the turn when it is dropped."""
        self.taken = Work(lambda: None)  # who takes it begins the save, or declines it
        weakref.finalize(self, self.after.set).atexit = False

    def __enter__(self) -> None:
        self.before.wait()

    def __exit__(self, *_: object) -> None:
        self.after.set()


class Order:
    """The numbers and directories of the last checkpoints that this rank has committed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._last: deque[tuple[int, Location]] = deque(maxlen=IN_FLIGHT)

    def is_replaced(self, number: int, directory: Location) -> bool:
        """Whether a checkpoint of a later call has been committed to the directory."""
        return any(n > number and place == directory for n, place in self._last)

    def add(self, number: int, directory: Location) -> None:
        """Note that a checkpoint was committed."""
        self._last.append((number, directory))


_REPLACED, _UNCERTAIN = b"r", b"u"  # first byte of the coordinator's answer; empty: committed


class DcpEnding(AgreedFile):
    """One rank's file of a checkpoint, which ``.metadata`` commits."""

    def __init__(
        self,
        world: World,
        turn: Turn,
        path: Location,
        agreed: Agreed,
        meta: StorageMeta | None,
        order: Order,
    ) -> None:
        """Prepare to end this rank's file together with the other ranks.

        Args:
            world: The ranks.
            turn: The save's turn.
            path: The path to write this rank's file to.
            agreed: The plans.
            meta: Identifies the save.
            order: The checkpoints that this rank has committed; used on the coordinator only.
        """
        super().__init__(path, world, f"{turn.name}/commit")
        self._number = turn.number
        self._order = order
        self.written: Written | None = None
        self._agreed = agreed
        self._meta = meta

    @override
    def publish(self, nbytes: int) -> Location:
        """Tell the coordinator the place of each item, and hear its decision.

        Raises as :func:`~datastates.ranks.world.settle` does. A CommitError may also say that the checkpoint stands
        but may not survive a power failure.
        """
        directory = self.path.parent
        store_of(directory).sync_folder(directory)
        assert self.written is not None
        found = self.written.results(nbytes)
        if not found:  # this rank has no part of the checkpoint
            store_of(self.path).discard([self.path])
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

        self.voted = True
        try:
            answer = settle(self.world, self.name, None, pickle.dumps(found), decide)
        except DatastatesError as error:
            if self.committed is None and not uncertain and (self.world.rank == 0 or is_told(error)):
                raise
            # the outcome is not known here: the checkpoint may stand, and then needs this file
            self.kept = True
            if self.committed is None and (uncertain or not self._stands()):
                raise
            return directory
        if answer == _REPLACED:
            self.abandon(made=True)
        elif answer:  # it stands, but may not survive a power failure
            self.kept = True
            raise uncertain[0] if uncertain else CommitError(answer[1:].decode())
        return directory

    def _stands(self) -> bool:
        stored = metadata_file.read(self.path.parent / metadata_file.FILE)
        return self.path.name in metadata_file.files(stored)
