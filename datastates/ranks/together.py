"""Going on together or not at all, by what the coordinator decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from datastates.errors import (
    CommitError,
    DatastatesError,
    RanksMissingError,
    StorageError,
    UnreachableError,
)
from datastates.ranks.board_world import text_of
from datastates.ranks.world import World

DONE, FAILED = b"+", b"-"


def settle(
    world: World,
    name: str,
    error: BaseException | None,
    data: bytes,
    decide: Callable[[dict[int, bytes]], bytes],
    *,
    timeout: float,
) -> bytes:
    """Go on together or not at all: returns, on all ranks, what the coordinator makes of every rank's data.

    Args:
        world: The ranks.
        name: What all of them call this.
        error: What keeps this rank from going on.
        data: What it has to say otherwise.
        decide: Called on the coordinator where no rank has failed.
        timeout: Seconds to wait for the others.

    Raises:
        BaseException: ``error``, once the others know of it.
        CommitError: Another rank has failed, or ``decide`` has; the same on all ranks.
        RanksMissingError: Some did not come in time.
    """
    text = b"" if error is None else (text_of(error) or type(error).__name__).encode(errors="replace")

    def outcome(told: dict[int, bytes]) -> bytes:
        if failed := [f"rank {rank}: {t[1:].decode()}" for rank, t in sorted(told.items()) if t[:1] == FAILED]:
            raise CommitError("; ".join(failed))
        return decide({rank: t[1:] for rank, t in told.items()})

    try:
        said = DONE + data if error is None else FAILED + text
        return world.agree(name, said, outcome, timeout=timeout, enough=lambda told: told[:1] == FAILED)
    except DatastatesError:
        if error is not None:
            raise error from None
        raise


def meet(world: World, name: str, path: Path, prepare: Callable[[], None], *, timeout: float) -> None:
    """Let the coordinator prepare a path before any rank writes there.

    Raises:
        CommitError: The ranks mean different paths, or preparing failed, or a rank has not come as far as this.
        RanksMissingError: Some did not come in time.
    """

    def decide(paths: dict[int, bytes]) -> bytes:
        other = next((rank for rank, data in sorted(paths.items()) if data != paths[0]), None)
        if other is not None:
            raise CommitError(f"rank 0 writes to {paths[0].decode()}, but rank {other} to {paths[other].decode()}")
        prepare()
        return b""

    settle(world, name, None, str(path).encode("utf-8", "backslashreplace"), decide, timeout=timeout)


def is_told(error: DatastatesError) -> bool:
    """Whether it is an answer of the coordinator's, or it can no longer decide: then it has not committed."""
    if isinstance(error, RanksMissingError):
        return error.undecided or 0 not in error.ranks
    return not isinstance(error, (UnreachableError, StorageError))
