"""Brings checkpoints from one place to another without a run: all that the other lacks, or one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from datastates.commit import manifest, newest
from datastates.commit.names import step_name
from datastates.commit.tiers import sweep_beside, tier_of
from datastates.draining.bring import Part, bring, is_damage_of
from datastates.errors import CheckpointNotFoundError, DatastatesError, FormatError
from datastates.formats import recognise
from datastates.storage.location import Location


class Brought(NamedTuple):
    """What has become of one checkpoint.

    Attributes:
        source: Where it was read.
        path: Where it lies now; None if it is damaged.
        damage: The damage; None if it is whole.
    """

    source: Location
    path: Location | None
    damage: DatastatesError | None = None


def lacking(
    source: Location, target: Location, step: int | None = None, *, only_newest: bool = False
) -> list[Location]:
    """The checkpoints of a place that another place lacks, the newest first.

    Args:
        source: The place, or one checkpoint.
        target: The other place.
        step: The step that is wanted; None for any.
        only_newest: Look for the newest one only.

    Raises:
        CheckpointNotFoundError: The place has none of ``step``, or none at all.
        StorageError: A place cannot be listed.
        ValueError: ``target`` is itself a checkpoint.
    """
    recognise.refuse_checkpoint(target)
    before: list[Location] = []
    while True:
        place = newest.given(source, is_checkpoint=manifest.look(source) is not None)
        chosen = newest.candidates(place, step)[-1 if only_newest else 0 :]
        if not chosen:
            newest.refuse_absence(source, step)
        there = {(one.step, one.attempt) for one in tier_of(target).checkpoints(certain=True)}
        try:
            opened = [(path, _opened(path)) for path in reversed(chosen)]
        except CheckpointNotFoundError:  # a run deletes what it does not keep
            if chosen == before:
                raise
            before = chosen
        else:
            return [path for path, made in opened if made is None or (made.step, made.attempt) not in there]


def _opened(path: Location) -> manifest.Manifest | None:
    """The manifest of a checkpoint; None if it is damaged."""
    try:
        return manifest.open(path)
    except FormatError:
        return None


def bring_each(
    paths: list[Location],
    target: Location,
    progress: Callable[[int, int], object],
    again: Callable[[], list[Location]] | None = None,
) -> Iterator[Brought]:
    """Bring checkpoints to a place, one after the other. A damaged one stays, and those after it are brought.

    Args:
        paths: The checkpoints.
        target: The place; made if needed.
        progress: Called with the bytes that are sent now, and the bytes of all checkpoints.
        again: Called in the end if a run deleted one of them meanwhile: returns what is to be brought now.

    Raises:
        CheckpointNotFoundError: One of them is no checkpoint any more, and ``again`` is not given.
        StorageError: A place cannot be read or written.
    """
    tier = tier_of(target)
    tier.make()
    total, is_gone = 0, False
    for path in paths:
        with contextlib.suppress(CheckpointNotFoundError):
            total += made.nbytes if (made := _opened(path)) is not None else 0
    part = Part(pace=lambda nbytes: progress(nbytes, total))
    for path in paths:
        try:
            made = manifest.open(path)
            place = target / step_name(made.step)
            sweep_beside(place)
            found = tier.arriving(place, made.attempt, b"")
            yield Brought(path, found if isinstance(found, Location) else bring(path, found, part))
        except CheckpointNotFoundError:
            if again is None:
                raise
            is_gone = True
        except DatastatesError as error:
            if not is_damage_of(path, error):
                raise
            yield Brought(path, None, error)
    if is_gone and again is not None:
        yield from bring_each(again(), target, progress, again)
