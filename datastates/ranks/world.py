"""Opens the world of ranks that this process belongs to, and lets all ranks go on together, or none."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

from datastates._base import log
from datastates._base.workers import start
from datastates.config import RankSettings
from datastates.errors import (
    CommitError,
    DatastatesError,
    RanksMissingError,
    SettingsError,
    StorageError,
    UnreachableError,
)
from datastates.ranks import jax_keys, torch_keys
from datastates.ranks.board_world import DONE, FAILED, BoardWorld, Decide, text_of, token_of
from datastates.ranks.join import join
from datastates.ranks.keys import Place
from datastates.ranks.polling import slowest
from datastates.ranks.store_board import Rounds, StoreBoard
from datastates.storage import Folders, store_of
from datastates.storage.location import Location


class World(Protocol):
    """The ranks that make a checkpoint together, as one of them sees it.

    Thread-safe: agreements of different names may run at once, on any threads and in any order.

    Attributes:
        rank: The number of this rank, from 0.
        size: The number of ranks.
        place: The framework's store where the ranks meet; None if they do not meet in one.
        timeout: Seconds that one wait for the other ranks may take. Rank 0 waits a fifth less, but at most 30 s less:
            it needs the rest to tell the others who is missing.
    """

    rank: int
    size: int
    place: Place | None
    timeout: float

    def agree(self, name: str, payload: bytes, decide: Decide) -> bytes:
        """Collect one payload of each rank on rank 0; returns on every rank the decision of rank 0.

        A rank that runs out of time withdraws its payload, so that rank 0 cannot decide without it. If rank 0 has begun
        to decide by then, the rank waits for the answer, at most ``timeout`` seconds more.

        Args:
            name: The name of the agreement: the same on all ranks, and used once in a run.
            payload: This rank's message. If it begins with :data:`~datastates.ranks.board_world.FAILED`, rank 0 decides
                without waiting for the others.
            decide: Called on rank 0 only, with the payloads by rank. A rank may be absent only if another has failed.
                Its result is returned on every rank.

        Raises:
            RanksMissingError: Some ranks did not answer in time. Rank 0 tells the others which. A rank that rank 0 did
                not reach names rank 0.
            CommitError: ``decide`` raised; every rank gets the text. Or this rank cannot reach the other ranks.
            StorageError: The shared directory failed.
            ClosedError: This world is closed.
        """

    def token(self, name: str) -> str:
        """8 hexadecimal digits for a name: the same on all ranks, different in other runs. Waits for no rank."""

    def close(self) -> None:
        """Delete this world's messages. Rank 0 first waits until all ranks have read its answers, up to its timeout."""


class SoloWorld:
    """A world of one rank, which waits for nobody.

    Attributes:
        by_wish: Whether the caller said that this rank is alone. Otherwise, no framework knew of others.
    """

    rank = 0
    size = 1
    timeout = float("inf")

    place: Place | None = None

    def __init__(self, *, by_wish: bool = True) -> None:
        """Make a world of one rank; see the attributes."""
        self._run = secrets.token_hex(8)
        self.by_wish = by_wish

    def agree(self, name: str, payload: bytes, decide: Decide) -> bytes:
        """Call ``decide`` at once. Its exceptions pass through unchanged."""
        return decide({0: payload})

    def token(self, name: str) -> str:
        """See :meth:`World.token`."""
        return token_of(self._run, name)

    def close(self) -> None:
        """Do nothing."""


_rounds: dict[str, Rounds] = {}
"""This process's rounds in a framework's store, by the name of the directory."""
_rounds_lock = threading.Lock()


def open_world(settings: RankSettings, directory: Location) -> World:
    """As :func:`world_of`, by the settings of a call."""
    return world_of(settings.rank, settings.world_size, directory, settings.rank_timeout)


def world_of(rank: int | None, world_size: int | None, directory: Location, timeout: float) -> World:
    """Open the world of ranks that this process belongs to.

    - With ``rank`` and ``world_size`` given, the ranks meet below ``directory``, which is created. The call waits until
      all ranks have come.
    - Otherwise, if torch.distributed is initialized with more than one rank, the ranks meet in its default Store; or
      else, if jax.distributed is initialized with more than one process, in JAX's coordination service. The others
      wait for rank 0 only. All ranks must open worlds for directories of one name in the same order. A round that
      fails on only some ranks does not put them out of step.
    - Otherwise this rank is alone.

    Args:
        rank: The number of this rank, or None.
        world_size: The number of ranks, or None.
        directory: The directory of the checkpoints.
        timeout: Seconds that each wait for the other ranks may take.

    Raises:
        SettingsError: ``rank`` and ``world_size`` are impossible; the message names the field. Or another process has
            this rank, or torch.distributed has no Store.
        RanksMissingError: Some ranks did not come to ``directory`` in time, or rank 0 did not open its world.
        CommitError: The store where the ranks meet cannot be reached.
        StorageError: ``directory`` cannot be written.
    """
    if rank is not None or world_size is not None:
        rank, world_size = _checked(rank, world_size)
        if world_size == 1:
            return SoloWorld()
        if not isinstance(store_of(directory), Folders):
            raise SettingsError(
                f"rank, world_size: ranks cannot meet in {directory}, a store of objects: initialize torch.distributed "
                "or jax.distributed first, and leave these out"
            )
        world = BoardWorld(rank, world_size, join(directory, rank, world_size, timeout), timeout=timeout)
        # once all have answered, every rank knows who belongs to this run
        world.agree("join", b"", lambda _: b"")
        return world
    # by name, not by path: hosts may mount the directory in different places
    next_round = _Round.of(directory.name, timeout)
    return SoloWorld(by_wish=False) if next_round is None else next_round.world()


def refuse(directory: Location, timeout: float, tell: Callable[[World], object]) -> None:
    """Tell the ranks that meet in a framework's store, in the background, why this rank does not open its world.

    The call takes the place of this rank's round, so that the others need not wait for it. Ranks that meet in a
    directory are not told.

    Args:
        directory: As for :func:`world_of`.
        timeout: As for :func:`world_of`.
        tell: Takes part in the first agreement on behalf of this rank. Its exceptions are ignored.
    """
    with contextlib.suppress(SettingsError):
        if (next_round := _Round.of(directory.name, timeout)) is not None:
            # a daemon: ranks that never come must not keep this process from ending
            start(threading.Thread(target=next_round.refuse, args=(tell,), name="datastates-refuse", daemon=True))


class _Round:
    """One round, which makes one world in a framework's store. It joins the line of this process's rounds at once."""

    def __init__(self, place: Place, name: str, timeout: float) -> None:
        self._place, self._name, self._timeout = place, name, timeout
        with _rounds_lock:
            self._rounds = _rounds.setdefault(name, Rounds(name))
        self._turn = self._rounds.queue()

    @classmethod
    def of(cls, name: str, timeout: float) -> _Round | None:
        """The next round of a name; None if this rank is alone."""
        place = _place()
        return None if place is None else cls(place, name, timeout)

    def world(self) -> World:
        """Open the world in the framework's store."""
        try:
            # a rank that gave up earlier than the others would report another outcome than they do
            keys = self._place.keys(self._timeout)
        except BaseException:
            self._turn.leave()
            raise
        try:
            number = self._rounds.enter(self._turn, keys, self._timeout, slowest(self._place.size))
        except BaseException:
            keys.close()
            raise
        board = StoreBoard(keys, f"{self._name}/{number}", leave=partial(self._rounds.end, keys, number))
        return BoardWorld(self._place.rank, self._place.size, board, timeout=self._timeout, place=self._place)

    def refuse(self, tell: Callable[[World], object]) -> None:
        with contextlib.suppress(Exception):  # the caller raises this rank's own error
            world = self.world()
            try:
                tell(world)
            finally:
                world.close()


def _place() -> Place | None:
    return torch_keys.place() or jax_keys.place()


def refuse_outdated(world: World) -> None:
    """Raise SettingsError if a framework's ranks have changed since a world was opened, unless the caller named them.

    Logs a warning if this process saves alone, and its launcher has started several.
    """
    if (isinstance(world, SoloWorld) and world.by_wish) or (world.place is None and world.size > 1):
        return
    if world.place is not None and world.place.refuses_by_itself:
        return
    place = _place()
    if place is None:
        if world.size == 1 and (ranks := os.environ.get("WORLD_SIZE", "")).isdecimal() and int(ranks) > 1:
            _warn_that_alone(ranks)
    elif world.place is None or place.store is not world.place.store:
        since = "before the ranks knew of each other" if world.size == 1 else "for ranks that have parted since"
        raise SettingsError(
            f"rank: this was opened {since}, as rank {world.rank} of {world.size}; now the process is rank "
            f"{place.rank} of {place.size}. Open it after torch.distributed.init_process_group() or "
            "jax.distributed.initialize(), or give rank and world_size"
        )


@cache
def _warn_that_alone(ranks: str) -> None:
    log.warning(
        "WORLD_SIZE is %s, but torch.distributed is not initialized, so this process saves as the only one. If the "
        "processes save one state together, call torch.distributed.init_process_group() before; if each saves for "
        "itself, give rank=0, world_size=1",
        ranks,
    )


def _checked(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        missing = "rank" if rank is None else "world_size"
        raise SettingsError(f"{missing}: rank and world_size are given together or not at all")
    for field, number in (("rank", rank), ("world_size", world_size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise SettingsError(f"{field}: {number!r:.40} is not an integer")
    if world_size < 1:
        raise SettingsError(f"world_size: {world_size} is less than 1")
    if not 0 <= rank < world_size:
        raise SettingsError(f"rank: {rank} is not from 0 to {world_size - 1}, one below world_size")
    return rank, world_size


def settle(
    world: World,
    name: str,
    error: BaseException | None,
    data: bytes,
    decide: Callable[[dict[int, bytes]], bytes],
) -> bytes:
    """Go on together or not at all; returns on all ranks the coordinator's result from every rank's data.

    Args:
        world: The ranks.
        name: The name of this agreement, the same on all ranks.
        error: The error that keeps this rank from going on, or None.
        data: This rank's message to the coordinator if it has no error.
        decide: Called on the coordinator with all ranks' data, by rank, if no rank has failed. Returns the result.

    Raises:
        BaseException: ``error``, after the other ranks were told.
        CommitError: Another rank has failed, or ``decide`` has. All ranks raise it with the same text.
        RanksMissingError: Some ranks did not come in time.
    """
    text = b"" if error is None else text_of(error).encode(errors="replace")

    def outcome(told: dict[int, bytes]) -> bytes:
        if failed := [f"rank {rank}: {t[1:].decode()}" for rank, t in sorted(told.items()) if t[:1] == FAILED]:
            raise CommitError("; ".join(failed))
        return decide({rank: t[1:] for rank, t in told.items()})

    try:
        return world.agree(name, DONE + data if error is None else FAILED + text, outcome)
    except DatastatesError:
        if error is not None:
            raise error from None
        raise


def meet(world: World, name: str, path: str, prepare: Callable[[], bytes]) -> bytes:
    """Let the coordinator prepare a path before any rank writes there; returns its bytes from ``prepare`` on all ranks.

    Raises:
        CommitError: The ranks gave different paths, or ``prepare`` failed, or a rank failed before this call.
        RanksMissingError: Some ranks did not come in time.
    """

    def decide(paths: dict[int, bytes]) -> bytes:
        other = next((rank for rank, data in sorted(paths.items()) if data != paths[0]), None)
        if other is not None:
            raise CommitError(f"rank 0 writes to {paths[0].decode()}, but rank {other} to {paths[other].decode()}")
        return prepare()

    return settle(world, name, None, path.encode("utf-8", "backslashreplace"), decide)


def is_told(error: DatastatesError) -> bool:
    """Whether an error settles the outcome: the coordinator sent it, or cannot decide any more. Else it may commit."""
    if isinstance(error, RanksMissingError):
        return error.undecided or 0 not in error.ranks
    return not isinstance(error, (UnreachableError, StorageError))
