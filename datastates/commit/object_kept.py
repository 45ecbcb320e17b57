"""Kept containers in a store of objects: they lie beside the checkpoints that name them, and go when none does.

``kept-SSSSSSSS.XXXXXXXX`` is a folder of those that one attempt has made. Nobody may name one behind its mark,
``NAME.ended``, which is made once no manifest names it, and nothing was put there for a day. Eight days later all who
looked before the mark have committed, or never will: an attempt ends sooner than a day, and a request that is late by
a week does not arrive any more. What no manifest names then, goes.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from datastates._base import log
from datastates._base.tasks import each
from datastates.commit import manifest
from datastates.commit.decision import Patience, decide
from datastates.commit.names import ENDED, KEPT_FOLDER, STEP, kept_folder, mark_of
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError, said
from datastates.storage import Entry, store_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT, AT_ONCE

_DAY = 86_400 * 10**9
ALONE = _DAY
"""Nanoseconds for which a folder that no manifest names may still be written."""
LOOKED = 8 * _DAY
"""Nanoseconds after its mark for which a folder may still be named by who looked before."""
LATE = 7 * _DAY
"""Nanoseconds for which a mark stays: a request that was sent before may arrive."""
MARKED = b"ended\n"
"""The bytes of a mark."""
_NAME = re.compile(rb"kept-[0-9]{8,18}\.[0-9a-f]{8}")


def folder(root: Location, step: int, attempt: str) -> Location:
    """The folder for the kept containers of an attempt: the first of its names without a mark; raises StorageError."""
    for number in itertools.count():
        other = hashlib.blake2b(f"{attempt}/{number}".encode(), digest_size=4).hexdigest()
        path = root / kept_folder(step, other if number else attempt)
        if not store_of(root).is_file(mark_of(path)):
            return path
    raise AssertionError("names do not end")


def refuse_ending(kept: Location, root: Location) -> None:
    """Raise StorageError if a new checkpoint may not name a kept container: its folder is marked, or not here."""
    if kept.parent.parent != root or not KEPT_FOLDER.match(kept.parent.name):
        raise StorageError(errno.EINVAL, "link", str(kept), f"{kept} is no file that several checkpoints name")
    if store_of(root).is_file(mark_of(kept.parent)):
        raise StorageError(errno.ENOENT, "link", str(kept), f"no checkpoint has named {kept} for a while: it goes")


class Deletions(NamedTuple):
    """What is to be deleted in a place.

    Attributes:
        ended: Prefixes of which all objects must go.
        ending: Folders of kept containers that get a mark.
        outlived: Single objects that must go.
    """

    ended: list[Location]
    ending: list[Location]
    outlived: list[Location]


class KeptFolders:
    """The folders of kept containers in one place. Thread-safe."""

    def __init__(self, root: Location) -> None:
        """Remember the place; nothing is read yet."""
        self._root = root
        self._changed: dict[str, int] = {}
        self._named: dict[str, frozenset[str]] = {}

    def unnamed(self, names: Mapping[str, Entry], now: int) -> Deletions:
        """Find the folders that no manifest names. Where one cannot be read, there are none.

        Args:
            names: What lies in the place.
            now: A time before that list, by the store's clock.
        """
        folders = {name for name in names if KEPT_FOLDER.match(name)}
        marks = {name: names[name + ENDED].changed for name in folders | _marked(names) if name + ENDED in names}
        outlived = [self._root / (name + ENDED) for name in marks if name not in folders and now - marks[name] > LATE]
        others = [name for name, entry in names.items() if entry.kind == "folder" and name not in folders]
        steps = [name for name in others if STEP.match(name)]
        try:
            alone = self._without_manifest(folders, steps) if folders else set()
            ended = {name for name in alone & marks.keys() if now - marks[name] > LOOKED}
            ending = {name for name in alone - marks.keys() if now - self._last_change(name, now) > ALONE}
            if ended or ending:  # a copy of a checkpoint, under a name that is no step's
                alone = self._without_manifest(alone, others)
        except (FormatError, StorageError) as error:
            log.warning("kept containers stay in %s, as what names them cannot be read: %s", self._root, said(error))
            return Deletions([], [], outlived)
        ended_now, ending_now = ([self._root / name for name in sorted(of & alone)] for of in (ended, ending))
        return Deletions(ended_now, ending_now, outlived)

    def _without_manifest(self, folders: Collection[str], checkpoints: Sequence[str]) -> set[str]:
        """The folders whose names are in no manifest."""
        return set(folders).difference(*each(self._named_by, checkpoints, AT_ONCE))

    def _named_by(self, name: str) -> frozenset[str]:
        """The names of folders in a manifest; raises FormatError for a run's own that is damaged."""
        if name in self._named:
            return self._named[name]
        path, match = self._root / name, STEP.match(name)
        try:
            if match is not None and match[3]:
                named = (one.folder for one in manifest.open(path).containers)
                self._named[name] = found = frozenset(folder for folder in named if folder is not None)
                return found
            data = store_of(path).read_all(path / manifest.FILE, manifest.MAX_NBYTES)  # perhaps of another program
            return frozenset(map(bytes.decode, _NAME.findall(data)))
        except CheckpointNotFoundError:
            return frozenset()
        except StorageError as error:
            if error.errno not in (*ABSENT, errno.EFBIG, errno.EINVAL):
                raise
            return frozenset()

    def _last_change(self, name: str, now: int) -> int:
        """When a folder was changed last, if that may be long ago."""
        if name not in self._changed or now - self._changed[name] > ALONE:
            found = store_of(self._root).entries(self._root / name, deep=True)
            self._changed[name] = max((entry.changed for entry in found.values()), default=0)
        return self._changed[name]


def end(folder: Location, patience: Patience) -> None:
    """Let no new checkpoint name a folder; raises StorageError."""
    decide(mark_of(folder), MARKED, patience.fence, patience)


def end_again(folder: Location) -> None:
    """Make the mark of a folder that is about to be cleared younger; raises StorageError.

    A drain may take the folder's name again once the mark is gone, and others may still be clearing it until then.
    """
    store_of(folder).replace(mark_of(folder), MARKED)


def _marked(names: Collection[str]) -> set[str]:
    """The folders that have a mark."""
    every = {name.removesuffix(ENDED) for name in names if name.endswith(ENDED)}
    return {name for name in every if KEPT_FOLDER.match(name)}
