"""Lists the folders in a directory of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable

from datastates.commit import manifest
from datastates.commit.names import STEP, final_of
from datastates.storage import folders_of, store_of
from datastates.storage.location import Location


def is_root(path: Location, names: Iterable[str]) -> bool:
    """Whether a path, where these names are, is a directory of checkpoints: one with a committed checkpoint in it."""
    return any(manifest.look(path / name) is not None for name in filter(STEP.match, names))


def without_manifest(root: Location, names: Iterable[str]) -> list[Location]:
    """Those of the names in ``root`` with the form of a checkpoint's, but no manifest: directories, and any links."""
    store = store_of(root)

    def has_none(entry: Location) -> bool:
        return manifest.look(entry) is None if store.is_folder(entry) else store.is_link(entry)

    return [e for name in sorted(filter(STEP.match, names)) if has_none(e := root / name)]


def steps(root: Location) -> list[Location]:
    """The directories in ``root`` with the name of a checkpoint, sorted; also links to directories."""
    store = store_of(root)
    return [e for name in sorted(store.names(root)) if STEP.match(name) and store.is_folder(e := root / name)]


def partials(root: Location, targets: re.Pattern[str]) -> list[Location]:
    """The partial directories in ``root`` of final names that ``targets`` matches, sorted; no links."""
    store = folders_of(root)
    every = (root / name for name in sorted(store.names(root)) if (final := final_of(name)) and targets.match(final))
    return [e for e in every if (found := store.look(e, follow=False)) is not None and found.kind == "folder"]


def entries(root: Location) -> list[Location]:
    """All directories directly in ``root``, sorted by name; no links."""
    found = store_of(root).entries(root)
    return [root / name for name in sorted(found) if found[name].kind == "folder"]
