"""Keys with values in a store that all ranks of a framework reach: what boards and openings need of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Keys(Protocol):
    """One rank's calls of a store.

    No method waits for a key. All are thread-safe, and raise UnreachableError when the store cannot be reached.

    Attributes:
        rank: This rank.
    """

    rank: int

    def set(self, key: str, data: bytes) -> None:
        """Give a key a value, in place of an older one."""

    def first(self, key: str, text: str) -> str:
        """Give a key a value, which is not empty, unless it has one; returns the key's value."""

    def found(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of those ``keys`` that have one, in their order. No rank may delete them during the call."""

    def mark(self, key: str) -> None:
        """Leave this rank's mark at a key, which has no value. A rank leaves it once."""

    def marks(self, key: str) -> int:
        """How many ranks have left a mark at a key."""

    def delete(self, key: str) -> None:
        """Delete a key with its value or its marks, if it is there."""

    def close(self) -> None:
        """End the calls. Later ones raise UnreachableError."""


@dataclass(frozen=True)
class Place:
    """A store of keys that all ranks of a framework reach."""

    rank: int
    size: int
    """The number of ranks, at least 2."""
    store: Any
    """An object that exists as long as the store does, and can be referenced weakly."""
    keys: Callable[[float], Keys]
    """Connects to the store. The argument: seconds to wait for an answer before the server counts as gone."""
