"""Agreements in which all ranks go on together, or none does. The coordinator (rank 0) decides."""

from __future__ import annotations

from collections.abc import Callable

from datastates.errors import (
    CommitError,
    DatastatesError,
    RanksMissingError,
    StorageError,
    UnreachableError,
)
from datastates.ranks.board_world import DONE, FAILED, text_of
from datastates.ranks.world import World
from datastates.storage.location import Location


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


def meet(world: World, name: str, path: Location, prepare: Callable[[], bytes]) -> bytes:
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

    return settle(world, name, None, str(path).encode("utf-8", "backslashreplace"), decide)


def is_told(error: DatastatesError) -> bool:
    """Whether an error settles the outcome: the coordinator sent it, or cannot decide any more. Else it may commit."""
    if isinstance(error, RanksMissingError):
        return error.undecided or 0 not in error.ranks
    return not isinstance(error, (UnreachableError, StorageError))
