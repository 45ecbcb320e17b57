"""Which keys a restore takes: all, or those that globs match. Pure, except that it notes which globs have matched."""

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
    """The globs, sorted, or None for all keys; raises TypeError or ValueError for anything that is no glob."""
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
        """Take the globs."""
        self._globs = {glob: re.compile(translate(glob)).match for glob in globs}
        self.unmatched = set(self._globs)

    def takes(self, full: str) -> bool:
        """Whether a glob matches a key."""
        return self._note(glob for glob, match in self._globs.items() if match(full))

    def covers(self, provider: str) -> bool:
        """Whether a glob takes a whole provider: it is the name, or ends in ``*`` and matches whatever follows it."""
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
        left_out: Keys within the provider of what is left as it is, in the order in which they were found.
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
        """Whether an array or value is restored; notes it if not. An array inside an object belongs to the object."""
        if is_inner(key) or self.takes(key):
            return True
        self.left_out[key] = None
        return False

    def prune(self, value: object, key: str) -> Any:
        """Put a reference in the place of every value that is not selected: providers keep what is live there.

        Dicts and lists are changed in place.

        Args:
            value: A stored object's structure, or the object.
            key: Its key within the provider.
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
