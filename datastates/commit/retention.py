"""Finds and deletes outdated checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from datastates._base import log
from datastates._base.tasks import each
from datastates.commit import health
from datastates.commit.newest import in_order
from datastates.commit.tier import Committed, Tier
from datastates.errors import said
from datastates.kept import Keep
from datastates.storage.location import Location

_AT_ONCE = 8
"""Checkpoints that are looked at at once, in a store of objects."""


def outdated(tier: Tier, keep: Keep) -> list[Location]:
    """The checkpoints of a tier that :func:`outdated_of` finds.

    Raises:
        StorageError: A manifest cannot be read, so that the order of the checkpoints is not certain.
    """
    every = tier.checkpoints(certain=True, known=True)

    def is_link(one: Committed) -> bool:
        return tier.is_link(one.path)

    def guess(one: Committed) -> bool:
        asked.append(one)
        return True

    asked: list[Committed] = []
    if tier.whole is not None:  # each look takes long, so several are at once
        outdated_of(every, keep, guess, is_link)
        each(partial(is_whole, tier), [one for one in asked if one.path not in tier.whole], _AT_ONCE)
    return [one.path for one in outdated_of(every, keep, partial(is_whole, tier), is_link)]


def outdated_of(
    every: Sequence[Committed],
    keep: Keep,
    is_whole: Callable[[Committed], bool],
    is_link: Callable[[Committed], bool] = lambda one: False,
) -> list[Committed]:
    """The checkpoints that need not be kept: superseded ones, and those beyond the limits, the oldest first of each.

    A damaged checkpoint counts neither towards ``keep.last`` nor towards ``keep.best``, and those that stand before
    enough whole ones stay. Nor does one count whose manifest was unreadable when it was listed: its place in the order
    is a guess. Nor does a link, and nothing is deleted through one.

    ``is_whole`` is asked once about a checkpoint, and only where the answer matters.
    """
    newest_first = in_order(every)[::-1]
    counts = functools.cache(lambda one: one.sequence is not None and not is_link(one) and is_whole(one))
    again = _superseded(newest_first, counts, is_link)
    rest = [one for one in newest_first if one not in again]
    if keep.last is None and keep.best is None:
        return again[::-1]
    beyond = rest[len(_first(rest, keep.last or 1, counts)) :]
    old = [one for one in beyond if (keep.every is None or one.step % keep.every) and not is_link(one)]
    if old and keep.best is not None:
        sign = 1 if keep.mode == "min" else -1
        measured = sorted((sign * one.metric, i) for i, one in enumerate(rest) if one.metric is not None)
        best = {*_first([rest[i] for _, i in measured], keep.best, counts)}
        old = [one for one in old if one not in best]
    return [*again[::-1], *old[::-1]]


def _superseded(
    newest_first: Sequence[Committed], counts: Callable[[Committed], bool], is_link: Callable[[Committed], bool]
) -> list[Committed]:
    count = Counter(one.step for one in newest_first)
    again: set[int] = set()
    found = []
    for one in newest_first:
        if count[one.step] > 1 and not is_link(one):
            if one.step in again:
                found.append(one)
            elif counts(one):
                again.add(one.step)
    return found


def _first(ordered: Sequence[Committed], number: int, counts: Callable[[Committed], bool]) -> Sequence[Committed]:
    """The first checkpoints, until so many of them count; all, without a look, if there are no more than that."""
    for at, one in enumerate(ordered if len(ordered) > number else ()):
        number -= counts(one)
        if not number:
            return ordered[: at + 1]
    return ordered


def is_whole(tier: Tier, one: Committed) -> bool:
    """Whether a checkpoint of a tier looks whole."""
    if tier.whole is None:
        return health.problem(one.path) is None
    if one.path not in tier.whole and health.problem(one.path) is None:
        tier.whole.add(one.path)
    return one.path in tier.whole


def retain(
    tier: Tier,
    keep: Keep,
    but: Collection[Location] = (),
    stay: Callable[[Sequence[Committed]], Collection[Location]] | None = None,
) -> None:
    """Delete the checkpoints that :func:`outdated` finds. One that cannot be deleted stays, and is logged.

    Args:
        tier: The tier.
        keep: The checkpoints that are kept.
        but: Others that stay this time.
        stay: Returns those of the tier's checkpoints that stay, too.
    """
    with warning():
        old = outdated(tier, keep)  # before the list for `stay`: that must have all of these
        needed = () if stay is None or not old else stay(tier.checkpoints(known=True))
        for path in old:
            if path not in but and path not in needed:
                with warning():
                    tier.remove(path)


def older(tier: Tier) -> list[Location]:
    """The checkpoints before the newest one that looks whole, the oldest first; no links."""
    every = in_order(tier.checkpoints(certain=True, known=True))[::-1]
    whole = next((i for i, one in enumerate(every) if is_whole(tier, one)), len(every))
    return [one.path for one in every[:whole:-1] if not tier.is_link(one.path)]


@contextlib.contextmanager
def warning() -> Iterator[None]:
    """A block whose errors are logged: a deletion that fails is no failure of the commit before it."""
    try:
        yield
    except Exception as error:  # also what a store raises against its contract: the commit before is done
        log.warning("an old checkpoint could not be deleted: %s", said(error) or type(error).__name__)
