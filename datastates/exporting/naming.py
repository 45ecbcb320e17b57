"""Chooses the tensors to export, and their names. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from datastates.restoring.renaming import Renames, as_text, renamed
from datastates.state.keys import is_inner, shown

ALONE = "tensor"
"""The name of a tensor that is all of a checkpoint."""


def choose(keys: Iterable[str], globs: Sequence[str]) -> list[str]:
    """The full keys that match any of some globs, written as in a shell, as they are or as people are shown them.

    The keys stay in their order.

    Raises:
        ValueError: A glob matches nothing; the message names it.
    """
    known = list(keys)
    for glob in globs:
        if not any(matches(key, [glob]) for key in known):
            raise ValueError(f"keys: no array of the checkpoint matches {glob!r}")
    return [key for key in known if matches(key, globs)]


def matches(key: str, globs: Sequence[str]) -> bool:
    """Whether a full key, or the key as people are shown it, matches any of some globs."""
    return any(fnmatchcase(key, glob) or fnmatchcase(shown(key), glob) for glob in globs)


def names_of(keys: Sequence[str], renames: Renames) -> dict[str, str]:
    """The name of each tensor in the export, by full key.

    The name is the full key without its provider if all keys belong to one provider, else the full key. An array inside
    a tensor has a name that people can read, unless another tensor has it; see :func:`~datastates.state.keys.shown`. A
    tensor that is all of a checkpoint has no key, and is named :data:`ALONE`. Then the first of the renames that
    matches a name changes it.

    Raises:
        ValueError: A rename matches nothing, two tensors would get one name, or one would get an empty name.
    """
    heads = {key.partition("/")[0] for key in keys}
    lone = len(heads) == 1 and not any(map(is_inner, heads))
    several = Counter(map(shown, keys))
    used = set()
    names: dict[str, str] = {}
    keys_of: dict[str, str] = {}
    for key in keys:
        name = key if several[shown(key)] > 1 else shown(key)
        name = (name.partition("/")[2] or name if lone else name) or ALONE
        name, by = renamed(name, renames)
        used.add(by)
        if not name:
            raise ValueError(f"rename: {key!r} would get an empty name")
        if name in keys_of:
            raise ValueError(f"rename: {keys_of[name]!r} and {key!r} would both be named {name!r}")
        names[key], keys_of[name] = name, key
    for old in renames:
        if old not in used:
            raise ValueError(f"rename: no name of an exported tensor matches {as_text(old)!r}")
    return names
