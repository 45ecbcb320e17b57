"""Where the ranks of a framework meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datastates.ranks.keys import Keys


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
