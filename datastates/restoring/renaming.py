"""New names for the keys of a checkpoint. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datastates.errors import RestoreError
from datastates.state.keys import around, within
from datastates.state.shards import full_key

Rename = str | re.Pattern[str]
Renames = Mapping[Rename, str]
"""Renames: a prefix of a key and its replacement, or a pattern and its replacement as in ``re.sub``."""


def checked_renames(renames: Any) -> Renames:
    """Check the renames of a user; raises TypeError for anything but a mapping of prefixes and patterns to strings."""
    if not isinstance(renames, Mapping):
        raise TypeError(f"rename: a mapping of old names to new ones is wanted, not a {type(renames).__name__}")
    for old, new in renames.items():
        pattern = old.pattern if isinstance(old, re.Pattern) else old
        if not isinstance(pattern, str) or not isinstance(new, str):
            raise TypeError(f"rename: {old!r:.40} to {new!r:.40} is no string or pattern, and a string")
    return renames


def renamed(name: str, renames: Renames) -> tuple[str, Rename | None]:
    """Apply the first rename that matches a name; returns the new name, and the rename or None if none matches."""
    for old, new in renames.items():
        if isinstance(old, str):
            if name.startswith(old):
                return new + name[len(old) :], old
        elif old.search(name):
            try:
                return old.sub(new, name), old
            except (re.error, IndexError) as error:
                raise ValueError(f"rename: {new!r} does not fit {old.pattern!r}: {error}") from error
    return name, None


def as_text(old: Rename) -> str:
    """The prefix or pattern that a rename replaces, for a message."""
    return old if isinstance(old, str) else old.pattern


class LiveKeys:
    """Tells by names alone which array of a checkpoint belongs to each array of the live state.

    Attributes:
        stored: The full key in the checkpoint, by the full key in the live state.
        live: The full key in the live state, by the full key in the checkpoint.
        providers: Names of the providers that lose or get an array by a rename.
    """

    def __init__(self, stored: Iterable[str], renames: Renames, providers: Sequence[str] = ()) -> None:
        """Rename the keys of a checkpoint.

        Args:
            stored: The full keys of all arrays of the checkpoint.
            renames: The renames; the first one that matches a key is used.
            providers: For a checkpoint of another format, whose keys begin with no provider's name: the live providers.
                If there is only one, its name is put in front of each key that does not begin with it.

        Raises:
            RestoreError: A rename matches nothing, or two arrays would get one key.
        """
        self.stored: dict[str, str] = {}
        names = [full_key(name, "") for name in providers]
        self.providers: set[str] = set(names)
        used = set()
        for key in stored:
            outer = around(key)  # an array inside a tensor goes with the tensor
            live, by = renamed(outer[0] if outer else key, renames)
            if by is not None:
                used.add(by)
            if len(names) == 1 and not live.startswith(f"{names[0]}/"):
                live = f"{names[0]}/{live}" if live else names[0]
            live = within(live, outer[1]) if outer else live
            if live in self.stored:
                raise RestoreError(f"rename: {self.stored[live]!r} and {key!r} would both be {live!r}")
            self.stored[live] = key
            if live != key:
                self.providers |= {key.partition("/")[0], live.partition("/")[0]}
        self.live = {key: live for live, key in self.stored.items()}
        for old in renames:
            if old not in used:
                raise RestoreError(f"rename: no array of the checkpoint matches {as_text(old)!r}")

    def concerns(self, name: str) -> bool:
        """Whether the arrays of a provider are found by their names alone."""
        return full_key(name, "") in self.providers

    def of_provider(self, name: str) -> list[str]:
        """The keys, within a provider, of its stored arrays. The key of an array that is all of its state is empty."""
        begin = full_key(name, "")
        whole = [""] if begin in self.stored else []
        return whole + [key[len(begin) + 1 :] for key in self.stored if key.startswith(f"{begin}/")]
