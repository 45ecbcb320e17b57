"""Brings frameworks' checkpoints from one place to another without a run: from a disk to copies, or back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from datastates.draining import folder
from datastates.draining.by_hand import Brought
from datastates.draining.copies import Copies, Copy
from datastates.draining.folder import Folder, step_of
from datastates.errors import CheckpointNotFoundError, CorruptError, FormatError
from datastates.storage import Folders, folders_of, store_of
from datastates.storage.location import Location

_One = TypeVar("_One")
Progress = Callable[[int, int], object]
"""Called with the bytes that are brought now, and the bytes of all checkpoints."""
Bring = Callable[[Progress], Iterator[Brought]]
"""Brings checkpoints one after the other. A damaged one stays, and those after it are brought."""


def fetching(source: Location, target: Location, step: int | None, *, only_newest: bool) -> Bring | None:
    """What fetches the newest copy of each checkpoint of a place, the newest first; None if it has no copies.

    Args:
        source: The place, or a checkpoint in it by its name.
        target: A directory on a disk.
        step: The last number in the name of the checkpoint that is wanted; None for any.
        only_newest: Fetch the newest one only.

    Raises:
        CheckpointNotFoundError: There is none of ``step``.
        CorruptError: A list of files is damaged, perhaps that of the newest.
        StorageError: A place cannot be listed.
        ValueError: There are copies, and the target is in a store of objects.
    """
    for place, name in ((source, ""), (source.parent, source.name)):
        copies, newest = Copies(place), dict[str, Copy]()
        for copy in copies.every().values():
            if name in ("", copy.name) and copy.number >= newest.get(copy.name, copy).number:
                newest[copy.name] = copy
        if copies.damaged and only_newest and not name and step is None:
            path = copies.place / f"{min(copies.damaged)}.json"
            text = f"{path} is damaged, and may be the list of the newest: give --step or a checkpoint's name"
            raise CorruptError(text, key=path.name, path=str(path))
        if newest:
            folders_of(target)
            wanted = _wanted(source, [(one.number, one.name, one) for one in newest.values()], step)
            return partial(_fetch, copies, wanted[: 1 if only_newest else None], target)
    return None


def sending(source: Location, target: Location, step: int | None) -> Bring | None:
    """What sends the frameworks' checkpoints of a directory, or the one at a path, that a place lacks.

    The newest first; None if there are none. Those without a record must be complete: no run may be writing them.
    Arguments and errors are as for :func:`fetching`.
    """
    if not isinstance(store_of(source), Folders):
        return None
    one = folder.found(source, by_hand=True)
    found = [] if one is not None and folder.is_surely(one) else folder.every(source, by_hand=True)
    if not (found := found or ([] if one is None else [one])):
        return None
    wanted = _wanted(source, [(one.number, one.path.name, one) for one in found], step)
    copies = Copies(target)
    there = copies.every()
    return partial(_send, copies, [one for one in wanted if copies.key_of(one) not in there])


def _wanted(source: Location, every: list[tuple[int, str, _One]], step: int | None) -> list[_One]:
    chosen = [(number, name, one) for number, name, one in every if step in (None, step_of(name))]
    if not chosen:
        raise CheckpointNotFoundError(f"{source} has no checkpoint of step {step}")
    return [one for *_, one in sorted(chosen, key=lambda found: found[:2], reverse=True)]


def _fetch(copies: Copies, wanted: list[Copy], target: Location, progress: Progress) -> Iterator[Brought]:
    total = sum(nbytes for one in wanted for nbytes, *_ in one.files.values())
    for one in reversed(wanted):  # the newest last: files beside the folders name the one that was fetched last
        source = copies.place / one.key
        yield _brought(source, partial(copies.fetch, one, target, lambda nbytes: progress(nbytes, total)))


def _send(copies: Copies, wanted: list[Folder], progress: Progress) -> Iterator[Brought]:
    total = sum(nbytes for one in wanted for nbytes, _ in one.files.values())

    def send(one: Folder) -> Location:
        return copies.place / copies.send(one, one.number, lambda nbytes: progress(nbytes, total)).key

    for one in wanted:
        yield _brought(one.path, partial(send, one))


def _brought(source: Location, bring: Callable[[], Location]) -> Brought:
    try:
        return Brought(source, bring())
    except FormatError as error:
        return Brought(source, None, error)
