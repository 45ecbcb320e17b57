"""Polling: repeated looks with growing pauses, for waits that nothing can wake."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_FIRST = 0.0002
_SLOWEST = 0.05
# all ranks together look at most this often per second, because they all ask one server
_LOOKS = 20_000

_T = TypeVar("_T")


def slowest(ranks: int) -> float:
    """The longest pause of one rank between two looks, in seconds, if ``ranks`` ranks poll one server."""
    return max(_SLOWEST, ranks / _LOOKS)


def first(interval: float) -> float:
    """The pause between the first two looks, in seconds. ``interval`` is the longest pause.

    Many ranks begin to poll at about the same time. Their first pause is an eighth of ``interval``, so that they do not
    flood the server.
    """
    return interval / 8 if interval > _SLOWEST else _FIRST


def until(look: Callable[[], _T | None], end: float, interval: float) -> _T | None:
    """Call ``look`` until it returns something. The pauses grow from :func:`first` to ``interval``.

    ``look`` is called at least once, and once more when the time is up.

    Args:
        look: Returns the thing it waits for once it is found, until then None.
        end: When to give up, on the monotonic clock.
        interval: The longest pause, in seconds.

    Returns:
        The result of ``look``, or None if the time was up.
    """
    pause = first(interval)
    while (found := look()) is None:
        left = end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left, interval))
        pause *= 1.5
    return found
