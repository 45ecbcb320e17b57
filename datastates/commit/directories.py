"""Names of checkpoint directories: lists those in a directory of checkpoints, and names a step's next one."""

from __future__ import annotations

import contextlib
import operator
import re
from typing import Any

from datastates.commit import manifest
from datastates.errors import CheckpointNotFoundError, FormatError
from datastates.storage import store_of
from datastates.storage.location import Location

STEP = re.compile(r"step-([0-9]{8,18})(?:\.r([0-9]+))?\Z")
PARTIAL = re.compile(r"(.+)\.partial-[0-9a-f]{8}\Z", re.DOTALL)


def checked_step(step: Any) -> int:
    """A step from any integer, also one of NumPy; raises TypeError or ValueError for anything else."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step: must be an integer, got {step!r:.40} ({type(step).__name__})")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise ValueError(f"step: {number} is not from 0 to 10**18 - 1")
    return number


def target(root: Location, step: int, *, in_flight: bool = True) -> Location:
    """The path for the next checkpoint of a step below ``root``. A step saved again gets a new revision.

    ``in_flight``: count revisions that are still being written, too.
    """
    name = step_name(step)
    entries = [e for e in store_of(root).names(root) if e.startswith(name)]
    names = (m[1] if (m := PARTIAL.match(e)) and in_flight else e for e in entries)
    taken = [int(m[2] or 0) for m in map(STEP.match, names) if m and int(m[1]) == step]
    return root / (f"{name}.r{1 + max(taken)}" if taken else name)


def step_name(step: int) -> str:
    """The name of a step's directory, without a revision."""
    return f"step-{step:08d}"


def is_root(path: Location) -> bool:
    """Whether a path is a directory of checkpoints: one with a committed checkpoint in it."""
    return any(manifest.look(e) is not None for e in steps(path))


def without_manifest(root: Location) -> list[Location]:
    """Entries of ``root`` with the name of a checkpoint but no manifest: directories, and links to anything."""
    store = store_of(root)

    def has_none(entry: Location) -> bool:
        return manifest.look(entry) is None if store.is_folder(entry) else store.is_link(entry)

    return [e for name in sorted(store.names(root)) if STEP.match(name) and has_none(e := root / name)]


def steps(root: Location) -> list[Location]:
    """The directories in ``root`` with the name of a checkpoint, sorted; also links to directories."""
    store = store_of(root)
    return [e for name in sorted(store.names(root)) if STEP.match(name) and store.is_folder(e := root / name)]


def entries(root: Location) -> list[Location]:
    """All directories directly in ``root``, sorted by name; no links."""
    store = store_of(root)
    every = ((root / name, store.look(root / name, follow=False)) for name in sorted(store.names(root)))
    return [path for path, found in every if found is not None and found.kind == "folder"]


def of_attempt(target: Location, attempt: str) -> Location | None:
    """The path of the checkpoint that an attempt committed at ``target`` or as a revision of it; None without one."""
    for entry in entries(target.parent):
        if entry.name == target.name or re.fullmatch(re.escape(target.name) + r"\.r[0-9]+", entry.name):
            with contextlib.suppress(CheckpointNotFoundError, FormatError):
                if manifest.open(entry).attempt == attempt:
                    return entry
    return None
