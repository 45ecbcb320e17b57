"""Which tensors are exported, and under which names. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

Renames = Mapping["str | re.Pattern[str]", str]
"""New names by old ones: a prefix and what replaces it, or a pattern and the replacement of ``re.sub``."""


def choose(keys: Iterable[str], globs: Sequence[str]) -> list[str]:
    """The full keys that match any of some globs, as those of a shell, in their order.

    Raises:
        ValueError: A glob matches nothing; the message names it.
    """
    known = list(keys)
    for glob in globs:
        if not any(fnmatchcase(key, glob) for key in known):
            raise ValueError(f"keys: no array of the checkpoint matches {glob!r}")
    return [key for key in known if any(fnmatchcase(key, glob) for glob in globs)]


def names_of(keys: Sequence[str], renames: Renames) -> dict[str, str]:
    """The name of each tensor in the export, by full key.

    The name is the full key without its provider if all keys belong to one provider, else the full key. Then the first
    of the renames that matches a name changes it.

    Raises:
        ValueError: A rename matches nothing, two tensors would get one name, or one would get an empty name.
    """
    lone = len({key.partition("/")[0] for key in keys}) == 1
    used = set()
    names: dict[str, str] = {}
    keys_of: dict[str, str] = {}
    for key in keys:
        name = key.partition("/")[2] or key if lone else key
        for old, new in renames.items():
            changed = _renamed(name, old, new)
            if changed is not None:
                used.add(old)
                name = changed
                break
        if not name:
            raise ValueError(f"rename: {key!r} would get an empty name")
        if name in keys_of:
            raise ValueError(f"rename: {keys_of[name]!r} and {key!r} would both be named {name!r}")
        names[key], keys_of[name] = name, key
    for old in renames:
        if old not in used:
            shown = old if isinstance(old, str) else old.pattern
            raise ValueError(f"rename: no name of an exported tensor matches {shown!r}")
    return names


def _renamed(name: str, old: str | re.Pattern[str], new: str) -> str | None:
    """The new name; None if the rename does not match."""
    if isinstance(old, str):
        return new + name[len(old) :] if name.startswith(old) else None
    return old.sub(new, name) if old.search(name) else None
