"""What of a checkpoint a restore takes, and what it makes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from datastates.restoring.renaming import Renames, as_text, checked_renames
from datastates.restoring.selection import checked_keys


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a checkpoint a restore takes. By default everything, as it is. The same on all ranks.

    Attributes:
        keys: The globs of the keys to restore; None for all.
        rename: New names of the checkpoint's keys.
        cast: Whether arrays of another floating-point type are converted.
    """

    keys: tuple[str, ...] | None = None
    rename: Renames = field(default_factory=lambda: MappingProxyType({}))
    cast: bool = False

    @classmethod
    def of(cls, keys: Any, rename: Any, cast: bool) -> Scope:
        """Check what the user gave; raises TypeError or ValueError."""
        if not isinstance(cast, bool):
            raise TypeError(f"cast: {cast!r} is neither True nor False: arrays are cast to the types of the live ones")
        return cls(checked_keys(keys), checked_renames(rename), cast)

    @property
    def is_all(self) -> bool:
        """Whether everything is taken as it is."""
        return self.keys is None and not self.rename and not self.cast

    def __str__(self) -> str:
        """A text by which ranks compare their scopes; empty for everything."""
        renames = [(as_text(o), o.flags if isinstance(o, re.Pattern) else None, new) for o, new in self.rename.items()]
        given = {"keys": self.keys and list(self.keys), "rename": renames, "cast": self.cast}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value)
