"""Where ranks agree: the world that this process finds itself in."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from datastates.errors import SettingsError
from datastates.ranks.board_world import BoardWorld, Decide, never, token_of
from datastates.ranks.join import join
from datastates.ranks.openings import Openings
from datastates.ranks.polling import slowest
from datastates.ranks.store_board import StoreBoard
from datastates.ranks.store_calls import StoreCalls


class World(Protocol):
    """The ranks that make a checkpoint together, as one of them sees it.

    Thread-safe: different names may be agreed on at once, on any threads and in any order.

    Attributes:
        rank: Which one this is, from 0.
        size: How many there are.
    """

    rank: int
    size: int

    def agree(
        self,
        name: str,
        payload: bytes,
        decide: Decide,
        *,
        timeout: float,
        enough: Callable[[bytes], bool] = never,
    ) -> bytes:
        """Bring one message of each rank together on rank 0, and what it makes of them back to all.

        A rank that runs out of time takes its payload back, so that nothing is decided without its knowledge. If rank 0
        has begun to decide by then, the rank waits for the answer, ``timeout`` seconds more at most.

        Args:
            name: What is agreed on; all ranks give the same, once in a run.
            payload: This rank's message.
            decide: Called on rank 0 alone, with the payloads by rank: of all ranks, or of those that were there when
                one of them was enough. What it returns is returned on every rank.
            timeout: Seconds that a wait may take. The last part of them is rank 0's to tell who is missing.
            enough: Says of a payload that the others need not be awaited: a failed vote.

        Raises:
            RanksMissingError: Some have not answered in time; the same on all ranks that rank 0 could tell. One that
                rank 0 did not tell names rank 0.
            CommitError: ``decide`` raised, with the text of that on all ranks; or the ranks cannot reach each other.
            StorageError: The shared directory failed.
            ClosedError: This world is closed.
        """

    def token(self, name: str) -> str:
        """8 hexadecimal digits that all ranks derive alike from a name, without waiting; other ones in another run."""

    def close(self) -> None:
        """Leave nothing behind. Rank 0 waits until all have read what it told them, as long as a wait may take."""


class SoloWorld:
    """One rank by itself: nobody to wait for."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._run = secrets.token_hex(8)

    def agree(
        self,
        name: str,
        payload: bytes,
        decide: Decide,
        *,
        timeout: float,
        enough: Callable[[bytes], bool] = never,
    ) -> bytes:
        """Decide at once; what ``decide`` raises is raised as it is."""
        return decide({0: payload})

    def token(self, name: str) -> str:
        """As of every world."""
        return token_of(self._run, name)

    def close(self) -> None:
        """Nothing to do."""


_openings: WeakKeyDictionary[Any, dict[str, Openings]] = WeakKeyDictionary()
"""By Store and by name: of another Store the ranks count anew."""
_openings_lock = threading.Lock()


def world_of(rank: int | None, world_size: int | None, directory: Path, timeout: float) -> World:
    """The world this process is in.

    With ``rank`` and ``world_size`` given, the ranks meet below ``directory``, which is created; that is waited for.
    Otherwise, if torch.distributed is initialized with more than one rank, they meet in its default Store; the others
    wait for rank 0 then, and all must open worlds for directories of one name in the same order. An opening that fails
    on some ranks only does not change that. Otherwise this rank is alone.

    Args:
        rank: Which rank this is, or None.
        world_size: How many ranks there are, or None.
        directory: Where the checkpoints are.
        timeout: Seconds to wait for the others, here and in :meth:`World.close`.

    Raises:
        SettingsError: ``rank`` and ``world_size`` are impossible; the message names the field.
        RanksMissingError: The others did not come to ``directory`` in time, or rank 0 did not open its world.
        CommitError: The Store of torch.distributed cannot be reached.
        StorageError: ``directory`` cannot be written.
    """
    if rank is not None or world_size is not None:
        rank, world_size = _checked(rank, world_size)
        if world_size == 1:
            return SoloWorld()
        world = BoardWorld(rank, world_size, join(directory, rank, world_size, timeout), timeout=timeout)
        # once all have answered, all know who belongs to this run
        world.agree("join", b"", lambda _: b"", timeout=timeout)
        return world
    # the name alone: hosts may see the directory in different places
    opening = _Opening.of(directory.name, timeout)
    return SoloWorld() if opening is None else opening.world()


def refuse(directory: Path, timeout: float, tell: Callable[[World], object]) -> None:
    """Let ranks that meet in torch's Store know, in the background, why this one does not open its world.

    It takes the place of this rank's opening, so that the others need not wait for it. Those that meet in a directory
    are not told: nobody is missed there before all have come.

    Args:
        directory: As for :func:`world_of`.
        timeout: As for :func:`world_of`.
        tell: Takes part in the first agreement, with what this rank has to say; what it raises is ignored.
    """
    with contextlib.suppress(SettingsError):
        if (opening := _Opening.of(directory.name, timeout)) is not None:
            # a daemon: a rank that ends with its error is not kept by others that never come
            threading.Thread(target=opening.refuse, args=(tell,), name="datastates-refuse", daemon=True).start()


class _Opening:
    """A call for a world in torch's Store: it has its place among those of this process when it is made."""

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout: float) -> None:
        self._store, self._rank, self._size, self._name, self._timeout = store, rank, size, name, timeout
        with _openings_lock:
            self._openings = _openings.setdefault(store, {}).setdefault(name, Openings(name))
        self._place = self._openings.queue()

    @classmethod
    def of(cls, name: str, timeout: float) -> _Opening | None:
        """The next one; None where this rank is alone."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        if world_size == 1:
            return None
        store = distributed.distributed_c10d._get_default_store()
        if store is None:
            raise SettingsError("rank: torch.distributed has no Store with this backend; give rank and world_size")
        return cls(store, rank, world_size, name, timeout)

    def world(self) -> World:
        """Open it."""
        try:
            calls = StoreCalls(self._store, self._rank, silence=min(self._timeout, 60.0))
        except BaseException:
            self._openings.leave(self._place)
            raise
        try:
            number = self._openings.enter(self._place, calls, self._timeout, slowest(self._size))
        except BaseException:
            calls.close()
            raise
        board = StoreBoard(calls, f"{self._name}/{number}", leave=partial(self._openings.end, calls, number))
        return BoardWorld(self._rank, self._size, board, timeout=self._timeout)

    def refuse(self, tell: Callable[[World], object]) -> None:
        with contextlib.suppress(Exception):  # this rank's own error is raised where it happened
            world = self.world()
            try:
                tell(world)
            finally:
                world.close()


def _checked(rank: int | None, world_size: int | None) -> tuple[int, int]:
    for field, number in (("rank", rank), ("world_size", world_size)):
        if number is None:
            raise SettingsError(f"{field}: rank and world_size are given together or not at all")
        if isinstance(number, bool) or not isinstance(number, int):
            raise SettingsError(f"{field}: {number!r:.40} is not an integer")
    assert rank is not None
    assert world_size is not None
    if world_size < 1:
        raise SettingsError(f"world_size: {world_size} is less than 1")
    if not 0 <= rank < world_size:
        raise SettingsError(f"rank: {rank} is not from 0 to {world_size - 1}, one below world_size")
    return rank, world_size
