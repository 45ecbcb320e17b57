"""Tells the other ranks about an error that keeps this rank from meeting them. They then need not wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from datastates.config import RankSettings
from datastates.ranks.together import settle
from datastates.ranks.world import World, refuse
from datastates.restoring.meeting import Meeting
from datastates.storage.location import Location

_OWN = ("rank", "world_size", "rank_timeout")


@contextlib.contextmanager
def telling(
    directory: Callable[[], Location], options: Mapping[str, Any], tell: Callable[[World, Exception], object]
) -> Iterator[None]:
    """If the ``with`` block raises, tell the other ranks in the background. It is for code before the world is opened.

    Ranks that meet in a directory, because ``rank`` and ``world_size`` are given, are not told.

    Args:
        directory: Returns the directory where the ranks meet.
        options: The options as the user gave them; they may be wrong.
        tell: Takes part in the first agreement of the ranks, with the world and the error.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # without a message, other ranks wait for their timeout
            settings = RankSettings.of({key: value for key, value in options.items() if key in _OWN})
            if settings.rank is None and settings.world_size is None:
                cause = error
                refuse(directory(), settings.rank_timeout, lambda world: tell(world, cause))
        raise


def refuse_to_meet(name: str, world: World, error: Exception) -> None:
    """Report ``error`` to the ranks that call :func:`datastates.ranks.together.meet` or ``settle`` with ``name``."""
    settle(world, name, error, b"", lambda _: b"")


def refuse_to_restore(name: str, world: World, error: Exception) -> None:
    """Report ``error`` to the ranks that choose in a :class:`~datastates.restoring.meeting.Meeting` named ``name``."""
    Meeting(world, name).refuse(error)
