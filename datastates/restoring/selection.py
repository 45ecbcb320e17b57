"""Selects the keys of a restore by globs. Pure, except that it notes which globs have matched."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import translate
from typing import Any

from datastates.container.unbuilt import Unbuilt
from datastates.state.keys import is_inner, join
from datastates.state.nested import items, with_items
from datastates.state.shards import ArrayRef

Keys = str | Collection[str]
"""A glob, or several, as :func:`fnmatch.fnmatchcase` takes them."""


def checked_keys(keys: Any) -> tuple[str, ...] | None:
    """Check globs that a user gave, and sort them; None stands for all keys.

    Raises:
        TypeError, ValueError: The value is no glob and no collection of globs.
    """
    if keys is None:
        return None
    globs = [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, Iterable) else [keys]
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(f"keys: a glob is a string, got {glob!r:.40} ({type(glob).__name__})")
    if not globs:
        raise ValueError("keys: there is no glob; None takes all keys")
    return tuple(sorted(set(globs)))


class Selection:
    """The keys that globs match. Keys are full keys of the live state. Not thread-safe.

    Attributes:
        unmatched: The globs that have matched nothing yet.
    """

    def __init__(self, globs: Iterable[str]) -> None:
        """Select by these globs."""
        self._globs = {glob: re.compile(translate(glob)).match for glob in globs}
        self.unmatched = set(self._globs)

    def takes(self, full: str) -> bool:
        """Whether a glob matches a key."""
        return self._note(glob for glob, match in self._globs.items() if match(full))

    def covers(self, provider: str) -> bool:
        """Whether a glob takes a whole provider: it matches the name, or the name, ``/`` and whatever follows."""
        return self._note(
            glob
            for glob, match in self._globs.items()
            if match(provider) or (glob.endswith("*") and match(f"{provider}/"))
        )

    def names(self, provider: str) -> bool:
        """Whether a glob begins with a provider's name and a slash."""
        return any(glob.startswith(f"{provider}/") for glob in self._globs)

    def _note(self, matched: Iterable[str]) -> bool:
        found = set(matched)
        self.unmatched -= found
        return bool(found)


class Cut:
    """The selected part of one provider.

    Attributes:
        left_out: Keys within the provider of the values that are not restored, in the order in which they were found.
    """

    def __init__(self, selection: Selection, provider: str) -> None:
        """Take the selection and the provider's full key in the live state."""
        self._selection = selection
        self._provider = provider
        self.left_out: dict[str, None] = {}

    def takes(self, key: str) -> bool:
        """Whether a key within the provider is selected."""
        return self._selection.takes(f"{self._provider}/{key}" if key else self._provider)

    def keeps(self, key: str) -> bool:
        """Whether an array or value is restored; if not, its key is noted. An array inside an object always is."""
        if is_inner(key) or self.takes(key):
            return True
        self.left_out[key] = None
        return False

    def prune(self, value: object, key: str) -> Any:
        """Replace every value that is not selected by a reference. A provider keeps its live value for a reference.

        Dicts and lists are changed in place.

        Args:
            value: A stored object's structure, or the object.
            key: Key of ``value`` within the provider.
        """
        return self._pruned(value, key, set())

    def _pruned(self, value: Any, key: str, seen: set[int]) -> Any:
        if isinstance(value, (ArrayRef, Unbuilt)) or id(value) in seen:
            return value
        if isinstance(value, (dict, list)):
            seen.add(id(value))
            for k, item in list(items(value)):
                value[k] = self._pruned(item, join(key, k), seen)
            return value
        if isinstance(value, tuple):
            some = [self._pruned(item, join(key, i), seen) for i, item in enumerate(value)]
            try:
                return with_items(value, some)
            except TypeError:  # torch.Size holds no references
                return _left_out(key)
        return value if self.keeps(key) else _left_out(key)


def _left_out(key: str) -> ArrayRef:
    return ArrayRef(key, "numpy", "uint8", (0,), (1,))
