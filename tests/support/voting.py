"""Threads as the ranks of a world, that agree on their joined votes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from datastates.errors import DatastatesError
from datastates.ranks.world import World, world_of

SIZE = 4
SECONDS = 20.0
ALL = b"<0><1><2><3>"
"""The joined votes of all."""


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call all at once, each on a thread; returns what each returned, or the ``DatastatesError`` that it raised."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except DatastatesError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def agree(worlds: list[World], name: str = "name", timeout: float = SECONDS, **options: Any) -> list[Any]:
    """Let all these worlds agree at once on their joined votes; returns the outcome of each."""
    options = {"decide": joined, **options}
    for world in worlds:
        world.timeout = timeout
    return together(*(lambda w=w: w.agree(name, f"<{w.rank}>".encode(), **options) for w in worlds))


def joined(votes: dict[int, bytes]) -> bytes:
    assert all(vote == f"<{rank}>".encode() for rank, vote in votes.items())
    return b"".join(votes[rank] for rank in sorted(votes))


def over_directory(path: Path, timeout: float = SECONDS) -> list[Any]:
    return together(*(lambda rank=rank: world_of(rank, SIZE, path, timeout) for rank in range(SIZE)))
