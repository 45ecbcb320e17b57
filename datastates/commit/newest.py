"""Finds the newest checkpoint in a directory: orders the committed ones by age."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from datastates.commit import manifest
from datastates.commit.directories import without_manifest
from datastates.commit.tier import Committed, Listing
from datastates.commit.tiers import tier_of
from datastates.errors import CheckpointNotFoundError, FormatError
from datastates.storage import store_of
from datastates.storage.location import Location

_NAMED = 8
"""Steps that a message names."""


class Given(NamedTuple):
    """What the path of a user means: the checkpoints in a place, or one of them.

    Attributes:
        tier: The checkpoints of the place.
        only: The one that the path is; None if it is the place.
    """

    tier: Listing
    only: Location | None = None


def given(path: Location, *, is_checkpoint: bool) -> Given:
    """What a path means, which is a checkpoint or a place of them."""
    return Given(tier_of(path.parent), path) if is_checkpoint else Given(tier_of(path))


def candidates(place: Given, step: int | None = None, *, certain: bool = True) -> list[Location]:
    """The checkpoints to choose from, the newest last: the only one, or all, or the newest of ``step``.

    Args:
        place: A checkpoint, or a place of them.
        step: The step that is wanted; None for any.
        certain: Raise StorageError if the newest is uncertain, because a manifest that may be the newest is unreadable.

    Raises:
        CheckpointNotFoundError: The only one is of another step, or is gone.
        StorageError: With ``certain``, the newest cannot be told.
    """
    if (only := place.only) is not None:
        if step is not None and (found := manifest.open(only).step) != step:
            raise CheckpointNotFoundError(f"{only} is the checkpoint of step {found}, not of step {step}")
        return [only]
    if not certain:  # of one step also those that another supersedes
        return [one.path for one in in_order(place.tier.checkpoints()) if step in (None, one.step)]
    every = by_certain_age(place.tier, step)
    return list(every.values()) if step is None else [every[step]] if step in every else []


def find(place: Given, step: int | None = None) -> Location:
    """The checkpoint that is meant: the only one, or the newest, or the newest of ``step``.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    if not (found := candidates(place, step)):
        refuse_absence(place.tier.root, step)
    return found[-1]


def refuse_absence(path: Location, step: int | None) -> NoReturn:
    """Raise CheckpointNotFoundError for ``path``, or for a step in it. The message names the checkpoints there."""
    if store_of(path).is_file(path):
        raise CheckpointNotFoundError(
            f"{path} is a file, and no checkpoint of another format: give the directory of the checkpoint it belongs to"
        )
    where = f" at {path}" if step is None else f" of step {step} in {path}"
    raise CheckpointNotFoundError(f"no committed checkpoint{where}{_what_is_there(path)}")


def _what_is_there(path: Location) -> str:
    """The end of an error message: the checkpoints that a directory has instead of the wanted one."""
    if not store_of(path).exists(path):
        return ", which does not exist"
    if every := list(committed(tier_of(path))):
        some = ", ".join(map(str, every[-_NAMED:]))
        return f", only of {'..., ' if len(every) > _NAMED else ''}{some}"
    if without := without_manifest(path, store_of(path).names(path)):
        return f"; {without[-1].name} has no {manifest.FILE}"
    return ""


def committed(tier: Listing) -> dict[int, Location]:
    """The committed checkpoints in a tier by step, ascending. For a step saved again, the newest one."""
    return dict(sorted(by_age(tier).items()))


def by_age(tier: Listing) -> dict[int, Location]:
    """As :func:`committed`, but the oldest first. After a roll-back this is not the order of the steps."""
    return oldest_first(tier.checkpoints())


def oldest_first(every: Sequence[Committed]) -> dict[int, Location]:
    """As :func:`by_age`, of what a tier has listed."""
    found: dict[int, Location] = {}
    for one in in_order(every):
        found.pop(one.step, None)
        found[one.step] = one.path
    return found


def by_certain_age(tier: Listing, step: int | None = None) -> dict[int, Location]:
    """As :func:`by_age`, but the place of the newest, or of the newest of ``step``, is no guess.

    Raises:
        StorageError: A manifest that may be the newest cannot be read.
    """

    def choose() -> Location | None:
        return next(reversed(every.values()), None) if step is None else every.get(step)

    found_there = tier.checkpoints()
    every = oldest_first(found_there)
    if all(one.sequence is not None for one in found_there):
        return every
    while (newest := choose()) is not None:
        with contextlib.suppress(CheckpointNotFoundError, FormatError):  # just deleted by another process; damaged
            if (found := manifest.look(newest)) is not None:
                manifest.facts_of(newest, found.version)  # cached, unless it could not be read before
        every = by_age(tier)
        if choose() == newest:
            break
    return every


def in_order(every: Sequence[Committed]) -> list[Committed]:
    """The checkpoints that a tier has listed, the oldest first.

    Checkpoints of format 1 have no sequence number. They come first, in the order of their steps. A checkpoint whose
    manifest cannot be read comes after all whose directories were not changed later than its own.
    """
    known = [(one.changed, one.sequence) for one in every if one.sequence is not None]

    def age(one: Committed) -> tuple[int, bool, int, int, str]:
        if one.sequence is not None:
            return one.sequence, False, one.step, one.revision, one.attempt
        guess = max((sequence for changed, sequence in known if changed <= one.changed), default=0)
        return guess, guess > 0, one.step, one.revision, one.attempt

    return sorted(every, key=age)
