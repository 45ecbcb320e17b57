"""The checkpoints in any store, to be read: what its listing and the manifests tell."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator

from typing_extensions import override

from datastates.commit import manifest
from datastates.commit.names import STEP
from datastates.commit.tier import Committed, ReadableTier
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError
from datastates.storage import store_of
from datastates.storage.location import Location

_LOOKS = 8
"""Checkpoints that are known and looked at again at each call."""


class StoreTier(ReadableTier):
    """The checkpoints in one place of a store. Nobody writes or deletes there by this package."""

    def __init__(self, root: Location) -> None:
        """Remember the place; nothing is read yet."""
        super().__init__(root)
        self._found: dict[str, tuple[int, Committed]] = {}
        self._last = ""

    @override
    def checkpoints(self, *, certain: bool = False, known: bool = False) -> list[Committed]:
        steps = {n: i for n, i in store_of(self.root).numbers(self.root).items() if STEP.match(n)}
        old = {n: one for n, one in self._found.items() if known and steps.get(n) == one[0]}
        for name in self._turn(old):
            del old[name]
        every = {name: old.get(name) or (steps[name], self._look(name, certain)) for name in sorted(steps)}
        found = [one for _, one in every.values() if one is not None]
        # no lock, which a fork might find taken: of two threads, the later one decides what is known
        self._found = {n: (i, one) for n, (i, one) in every.items() if one is not None and one.sequence is not None}
        if all(one.sequence is not None for one in found):
            return found
        # the commit made the last change of a folder: it unlinked the lock
        folders = [store_of(one.path).look(one.path) for one in found]
        return [
            one._replace(changed=folder.changed)
            for one, folder in zip(found, folders, strict=True)
            if folder is not None
        ]

    def _turn(self, old: Iterable[str]) -> list[str]:
        """Some of the names, others at each call: a number of a listing may be given again, and a file be replaced."""
        names = sorted(old)
        begin = next((i for i, name in enumerate(names) if name > self._last), 0)
        chosen = [*names[begin:], *names[:begin]][:_LOOKS]
        self._last = chosen[-1] if chosen else ""
        return chosen

    def _look(self, name: str, certain: bool) -> Committed | None:
        """Look at one checkpoint; None if it is none."""
        entry, match = self.root / name, STEP.match(name)
        assert match is not None
        if (file := manifest.look(entry)) is None:
            return None
        try:
            sequence = sequence_of(entry, file.version)
        except CheckpointNotFoundError:  # another process has just deleted it
            return None
        except StorageError:
            if certain:
                raise
            sequence = None  # reported to whoever opens it
        return Committed(sequence, int(match[1]), int(match[2] or 0), entry, 0)

    @override
    @contextlib.contextmanager
    def protect(self, path: Location) -> Iterator[None]:
        if manifest.look(path) is None:
            raise CheckpointNotFoundError(f"{path} is not a committed checkpoint: it has no {manifest.FILE}")
        yield

    @override
    def debris(self, targets: re.Pattern[str] = STEP) -> list[Location]:
        return []


@functools.lru_cache(maxsize=1 << 16)
def sequence_of(path: Location, version: tuple[int, ...]) -> int | None:
    """The sequence number in a manifest. Cached while the file's ``version`` stays the same."""
    del version
    try:
        return manifest.open(path).sequence or 0
    except FormatError:
        return None
