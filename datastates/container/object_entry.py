"""The entry of an object in a file: its key, its place, and a function that reads it without running code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from datastates.container.unbuilt import Unbuilt
from datastates.state.nested import leaves
from datastates.state.shards import StoredArray

Survey = Callable[[Callable[[StoredArray], object]], "tuple[Any, bool]"]
"""Reads an object like :func:`datastates.container.pickle_reader.survey`, given a function that supplies arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class ObjectEntry:
    """An object of a file, listed but not built.

    Attributes:
        key: Its full key.
        rank: The rank that saved it; 0 where the file does not say.
        survey: Reads it, and builds nothing that would run code of its classes.
        stored: Stands for its stored bytes: entries with equal ``stored`` hold the same object.
        offset, nbytes, crc: The place of its opcodes in the file, in bytes, and their CRC-32; None where unknown.
    """

    key: str
    rank: int
    survey: Survey
    stored: object
    offset: int | None = None
    nbytes: int | None = None
    crc: int | None = None

    def classes(self) -> list[str]:
        """The classes whose code would have to run to build it, as ``module.qualname``."""
        value, _ = self.survey(lambda stored: stored)
        kinds = {type(leaf) for _, leaf in leaves(value) if isinstance(leaf, Unbuilt)}
        return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def by_key(entries: Iterable[ObjectEntry]) -> dict[str, ObjectEntry]:
    """Objects by full key, in their order; of several with one key the first."""
    found: dict[str, ObjectEntry] = {}
    for entry in entries:
        found.setdefault(entry.key, entry)
    return found
