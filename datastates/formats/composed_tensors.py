"""The tensors of a checkpoint of another format that consist of others, and are built from these by their classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from datastates.container.pickle_reader import Trust
from datastates.formats.foreign_file import ForeignFile


class ComposedTensors:
    """The tensors in all files, as :class:`~datastates.reading.tensors.ComposedTensors`."""

    def __init__(self, files: Sequence[ForeignFile]) -> None:
        """Take the files of a checkpoint."""
        self._files = [file for file in files if file.composed]
        self.arrays: Mapping[str, Sequence[str]] = {
            key: [*one.arrays] for file in self._files for key, one in file.composed.items()
        }

    def kind(self, full: str) -> str:
        """The name of a tensor's class."""
        return next(type(file.composed[full].stand).__name__ for file in self._files if full in file.composed)

    def vet(self, fulls: Collection[str], trust: Trust) -> None:
        """Refuse tensors that could not be built; raises TrustError and FormatError."""
        for file in self._files:
            if wanted := [full for full in fulls if full in file.composed]:
                file.vet_composed(wanted, trust)

    def build(self, arrays: Mapping[str, object], trust: Trust) -> dict[str, Any]:
        """Build the tensors all of whose arrays are given; raises as :meth:`vet`."""
        found: dict[str, Any] = {}
        for file in self._files:
            if any(full in arrays for one in file.composed.values() for full in one.arrays):
                found |= file.build_composed(arrays, trust)
        return found
