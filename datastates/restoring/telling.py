"""What keeps a rank from meeting the others is told to them: they are not to wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datastates.config import RankSettings
from datastates.ranks.together import settle
from datastates.ranks.world import World, refuse
from datastates.restoring.meeting import Meeting

_OWN = ("rank", "world_size", "rank_timeout")


@contextlib.contextmanager
def telling(
    directory: Callable[[], Path], options: Mapping[str, Any], tell: Callable[[World, Exception, float], object]
) -> Iterator[None]:
    """Until a world is opened, tell the other ranks in the background what this block raises.

    Args:
        directory: Gives where they meet.
        options: As the user gave them; they need not be right.
        tell: Takes part in their first agreement, with the error and for how many seconds at most.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # where that is impossible, too, they find out by its absence
            settings = RankSettings.of({key: value for key, value in options.items() if key in _OWN})
            if settings.rank is None and settings.world_size is None:
                timeout, cause = settings.rank_timeout, error
                refuse(directory(), timeout, lambda world: tell(world, cause, timeout))
        raise


def refuse_to_meet(name: str, world: World, error: Exception, timeout: float) -> None:
    """Where the others call :func:`datastates.ranks.together.meet` or ``settle`` under that name."""
    settle(world, name, error, b"", lambda _: b"", timeout=timeout)


def refuse_to_restore(name: str, world: World, error: Exception, timeout: float) -> None:
    """Where the others choose a checkpoint in a :class:`~datastates.restoring.meeting.Meeting` of that name."""
    Meeting(world, name, timeout).refuse(error)
