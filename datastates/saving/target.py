"""Where a checkpoint will stand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint will stand: as expected when it is begun, and as found when it is committed."""

    expected: Callable[[], Path]
    final: Callable[[], Path]

    @classmethod
    def fixed(cls, choose: Callable[[], Path]) -> Target:
        """At one path, which is chosen when the checkpoint is begun."""
        chosen = functools.cache(choose)
        return cls(chosen, chosen)
