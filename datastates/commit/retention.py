"""Finds and deletes outdated checkpoints."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator

from datastates._base import log
from datastates._base.tasks import each
from datastates.commit import health
from datastates.commit.newest import in_order
from datastates.commit.tier import Tier
from datastates.config import Keep
from datastates.errors import said
from datastates.storage.location import Location

_AT_ONCE = 8
"""Checkpoints that are looked at at once, in a store of objects."""


def outdated(tier: Tier, keep: Keep) -> list[Location]:
    """The checkpoints that need not be kept: superseded ones, and those beyond the limits.

    A damaged checkpoint does not count towards ``keep.last``: so many are kept that look whole. Nor does a link, and
    nothing is deleted through one.

    Raises:
        StorageError: A manifest cannot be read, so that the order of the checkpoints is not certain.
    """
    every = _newest_first(tier)
    again = _superseded(tier, every)
    rest = [(step, path) for step, path in every if path not in again]
    if keep.last is None or len(rest) <= keep.last:
        return again
    _see(tier, [path for _, path in rest[: keep.last]])
    kept, old = 0, []
    for step, path in rest:
        if kept == keep.last:
            if (keep.every is None or step % keep.every) and not tier.is_link(path):
                old.append(path)
        elif not tier.is_link(path) and _is_whole(tier, path):
            kept += 1
    return [*again, *old[::-1]]


def _newest_first(tier: Tier) -> list[tuple[int, Location]]:
    return in_order(tier.checkpoints(certain=True, known=True))[::-1]


def _superseded(tier: Tier, every: list[tuple[int, Location]]) -> list[Location]:
    count = Counter(step for step, _ in every)
    again: set[int] = set()
    found = []
    for step, path in every:
        if count[step] > 1 and not tier.is_link(path):
            if step in again:
                found.append(path)
            elif _is_whole(tier, path):
                again.add(step)
    return found[::-1]


def _is_whole(tier: Tier, path: Location) -> bool:
    return (tier.whole is not None and path in tier.whole) or health.problem(path) is None


def _see(tier: Tier, paths: list[Location]) -> None:
    """Look at checkpoints that this process has not seen whole yet, several at once, where they stay as they are."""
    if tier.whole is not None:
        new = [path for path in paths if path not in tier.whole]
        problems = each(health.problem, new, _AT_ONCE)
        tier.whole.update(path for path, what in zip(new, problems, strict=True) if what is None)


def retain(tier: Tier, keep: Keep, but: Collection[Location] = ()) -> None:
    """Delete the checkpoints that :func:`outdated` finds. One that cannot be deleted stays, and is logged.

    ``but``: checkpoints that stay this time.
    """
    with _warning():
        for path in outdated(tier, keep):
            if path not in but:
                with _warning():
                    tier.remove(path)


def older(tier: Tier) -> list[Location]:
    """The checkpoints before the newest one that looks whole, the oldest first; no links."""
    every = _newest_first(tier)
    whole = next((i for i, (_, path) in enumerate(every) if _is_whole(tier, path)), len(every))
    return [path for _, path in every[:whole:-1] if not tier.is_link(path)]


@contextlib.contextmanager
def _warning() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # also what a store raises against its contract: the commit before is done
        log.warning("an old checkpoint could not be deleted: %s", said(error) or type(error).__name__)
