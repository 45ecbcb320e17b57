"""The protocol of a framework's store that all ranks reach: keys with values, for boards and rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Keys(Protocol):
    """One rank's calls of a framework's store.

    No method waits for a key. All are thread-safe, and raise UnreachableError when the store cannot be reached.

    Attributes:
        rank: This rank.
    """

    rank: int

    def set(self, key: str, data: bytes) -> None:
        """Set the value of a key, in place of an older value."""

    def first(self, key: str, text: str) -> str:
        """Set the value of a key, a text that is not empty, unless the key has a value. Returns the key's value."""

    def found(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The values of these ``keys``, in their order, without absent ones. No rank may delete any during the call."""

    def mark(self, key: str) -> None:
        """Leave this rank's mark at a key, which has no value. A rank leaves it once."""

    def marks(self, key: str) -> int:
        """The number of ranks that have left a mark at a key."""

    def delete(self, key: str) -> None:
        """Delete a key with its value or its marks, if it is there."""

    def close(self) -> None:
        """End the calls. Later calls raise UnreachableError."""


@dataclass(frozen=True)
class Place:
    """A framework's store where its ranks meet, and the way to connect to it."""

    rank: int
    size: int
    """The number of ranks, at least 2."""
    store: Any
    """An object that exists as long as the store does, and can be referenced weakly."""
    keys: Callable[[float], Keys]
    """Connects to the store. Its argument: seconds to wait for an answer before the server counts as gone."""
    refuses_by_itself: bool = False
    """Whether calls fail, with the remedy, once the framework's ranks have changed."""
