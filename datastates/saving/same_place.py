"""Finds the engines of this process that save in one directory, however it is named."""

from __future__ import annotations

import weakref

from datastates.saving import gate
from datastates.saving.engine import Engine
from datastates.storage import folders_of
from datastates.storage.location import Location

_places: weakref.WeakKeyDictionary[Engine, tuple[Location, object]] = weakref.WeakKeyDictionary()
"""For each engine its directory, and the file system's name for it."""


def add(engine: Engine, root: Location) -> None:
    """Note that an engine saves in a directory; raises StorageError if that cannot be looked at."""
    found = folders_of(root).look(root)
    _places[engine] = root, found and found.place


def wait(engine: Engine) -> None:
    """Wait until the state may change, and no engine has a snapshot in flight in the directory of ``engine``."""
    gate.pass_all()
    root, place = _places[engine]
    for other, (its_root, its_place) in list(_places.items()):
        if its_root == root or its_place == place:
            other.wait()
