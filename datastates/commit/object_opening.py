"""Openings in a store of objects: a run that has begun to save keeps earlier runs from saving.

``.saving-N`` is made when a run takes its first snapshot. It fences the runs with a lower N, which look for it before
each commit. A run that is stopped between that look and the creation of its manifest can still commit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from typing_extensions import override

from datastates._base.packing import pack, unpack
from datastates.commit import object_trial
from datastates.commit.decision import Patience, decide
from datastates.commit.names import SAVING
from datastates.commit.opening import Opening, fields_of, owner_of, record_of, told
from datastates.storage import store_of
from datastates.storage.location import Location


class Place(Protocol):
    """What an opening asks its tier."""

    root: Location
    patience: Patience

    def names(self) -> Collection[str]:
        """The names in the place; perhaps those of a list that this thread has just made."""


def begin(place: Place) -> bytes:
    """Number a new opening, as rank 0 does; returns what all ranks are told. Raises StorageError."""
    return pack([1 + max(_numbers(place), default=0), owner_of(os.getpid())])


def _numbers(place: Place) -> list[int]:
    return [int(match[1]) for match in map(SAVING.match, place.names()) if match]


class ObjectOpening(Opening):
    """One run's opening of a place in a store of objects."""

    def __init__(self, place: Place, data: bytes) -> None:
        """Take what :func:`begin` has returned."""
        self.root = place.root
        self._place = place
        self._number, self._owner = unpack(data)
        self._saves = False
        self._beginning = threading.Lock()

    @property
    @override
    def mark(self) -> bytes:
        return b""

    @override
    def begin_to_save(self, then: Callable[[], None] = lambda: None) -> None:
        with self._beginning:
            self.refuse_if_known_fenced()  # each commit looks for a newer one
            if self._saves:
                return
            object_trial.refuse_overwriting(self.root)
            self.refuse_if_fenced()
            self._write_down()
            then()
            self._saves = True

    def _write_down(self) -> None:
        while True:
            path, data = self._record(self._number), record_of(self._owner)
            found = decide(path, data, self._place.patience.fence, self._place.patience)
            if fields_of(found).get("owner") == self._owner:
                break
            self._number += 1  # another run had opened it at the same time
        lower = [self._record(number) for number in _numbers(self._place) if number < self._number]
        store_of(self.root).discard(lower)

    def _record(self, number: int) -> Location:
        return self.root / f".saving-{number}"

    @override
    def refuse_if_fenced(self) -> None:
        self.refuse_if_known_fenced()
        newest = max(_numbers(self._place), default=0)
        if newest > self._number:
            record = told(self._record(newest), certain=True)
            if record.get("owner") != self._owner:
                self._refuse_newer(record)

    @override
    def refuse_elsewhere(self) -> None:
        """Do nothing: a list of a bucket that is gone fails."""

    @override
    def close(self) -> None:
        """Do nothing: the record tells later runs their number."""
