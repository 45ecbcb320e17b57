"""The path that a checkpoint will have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """The path that a checkpoint will have.

    Attributes:
        expected: Returns the path that is expected at the beginning. The partial directory lies beside it.
        final: Returns the path to commit to. Called on the coordinator at the commit.
    """

    expected: Callable[[], Path]
    final: Callable[[], Path]

    @classmethod
    def fixed(cls, choose: Callable[[], Path]) -> Target:
        """A target whose path ``choose`` determines once, when the checkpoint is begun."""
        chosen = functools.cache(choose)
        return cls(chosen, chosen)
