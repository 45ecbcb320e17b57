"""Waiting by looking again and again: where nobody can wake the waiter."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_FIRST = 0.001
_SLOWEST = 0.05
# however many ranks look, together no more often than this in a second: they all ask one server
_LOOKS = 20_000

_T = TypeVar("_T")


def slowest(ranks: int) -> float:
    """Seconds between two looks once the wait has become long, for each of so many ranks."""
    return max(_SLOWEST, ranks / _LOOKS)


def first(interval: float) -> float:
    """Seconds between the first two looks, where those may come ``interval`` apart in the end.

    Many ranks begin to wait at about one time: together they look eight times as often then as later, and no more.
    """
    return max(_FIRST, interval / 8) if interval > _SLOWEST else _FIRST


def until(look: Callable[[], _T | None], end: float, interval: float) -> _T | None:
    """Look until something is there, at first after :func:`first`, then ever more seldom down to every ``interval``.

    Looks at least once, and once more when the time is up: what came in the last sleep counts.

    Args:
        look: Gives what is there, or None.
        end: When to give up, on the monotonic clock.
        interval: The longest pause, in seconds.

    Returns:
        What it found, or None when the time was up.
    """
    pause = first(interval)
    while (found := look()) is None:
        left = end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left, interval))
        pause *= 1.5
    return found
