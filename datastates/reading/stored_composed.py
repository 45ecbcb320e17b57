"""Tensors that consist of others, in the objects of a checkpoint of this package, for a restore by names alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datastates.container import pickle_reader, pickle_writer
from datastates.container.composed import arrays_inside
from datastates.container.file import Container
from datastates.container.pickle_picker import Picked
from datastates.container.pickle_reader import Trust
from datastates.container.rows import StoredRows, place_in_pickle
from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError, naming
from datastates.reading.stored import Stored
from datastates.state import memory
from datastates.state.nested import leaves
from datastates.state.shards import StoredArray, full_key


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """An object with such tensors: its container, its provider's name and rows, its full key and its opcodes."""

    source: Container
    provider: str
    rows: StoredRows
    full: str
    opcodes: bytes

    def inside(self) -> dict[str, tuple[str, list[str]]]:
        """For each such tensor, the name of its class, and the full keys of its arrays."""
        value, _ = pickle_reader.survey(pickle_writer.stream(self.opcodes), lambda stored: stored, trust="all")
        made = {}
        for key, leaf in leaves(value, self.full):
            if isinstance(leaf, Unbuilt) and leaf.attributes is not None:
                keys = [self._key(stored) for _, stored in arrays_inside(leaf)]
                made[key] = type(leaf).__name__, [one for one in keys if one is not None]
        return made

    def _key(self, stored: StoredArray) -> str | None:
        key = self.rows.by_place.get(place_in_pickle(stored))
        return None if key is None else full_key(self.provider, key)

    def picked(self, arrays: Mapping[str, object], trust: Trust) -> tuple[Picked, dict[str, object]]:
        """Build what may be built of given arrays. Returns it, and all of it by full key."""

        def resolve(stored: StoredArray) -> object:
            array = arrays.get(self._key(stored) or "")
            return Unbuilt() if array is None else memory.with_grad(array, stored.requires_grad)

        with naming(f"{self.full!r} in {self.source.path}"):
            picked = Picked(pickle_writer.stream(self.opcodes), resolve, trust)
        return picked, dict(leaves(picked.value, self.full))


class StoredComposed:
    """The tensors in the objects of some providers, as :class:`~datastates.reading.tensors.ComposedTensors`."""

    def __init__(self, stored: Stored, providers: Collection[str]) -> None:
        """Read the objects of the providers, of each the first rank's. None are read if there are no providers."""
        self._objects: dict[str, _Object] = {}
        self._kinds: dict[str, str] = {}
        self._of: dict[str, str] = {}  # by the full key of a tensor, that of its object
        arrays: dict[str, Sequence[str]] = {}
        for source in stored.every() if providers else ():
            for one in source.index.objects:
                name = source.index.shards.providers[one.provider]
                full = full_key(name, one.key)
                if name not in providers or full in self._objects:
                    continue
                rows = StoredRows(source.index, name)
                held = self._objects[full] = _Object(source, name, rows, full, source.read_object(one))
                for key, (kind, keys) in held.inside().items():
                    self._kinds[key], self._of[key], arrays[key] = kind, full, keys
        self.arrays: Mapping[str, Sequence[str]] = arrays

    def kind(self, full: str) -> str:
        """The name of a tensor's class."""
        return self._kinds[full]

    def vet(self, fulls: Collection[str], trust: Trust) -> None:
        """Refuse tensors that could not be built; raises TrustError and FormatError."""
        for held in dict.fromkeys(self._of[full] for full in fulls):
            picked, found = self._objects[held].picked({}, trust)
            picked.vet([found[full] for full in fulls if self._of[full] == held])

    def build(self, arrays: Mapping[str, object], trust: Trust) -> dict[str, Any]:
        """Build the tensors all of whose arrays are given; raises as :meth:`vet`."""
        wanted = [full for full, keys in self.arrays.items() if keys and arrays.keys() >= set(keys)]
        made: dict[str, Any] = {}
        for held in dict.fromkeys(self._of[full] for full in wanted):
            picked, found = self._objects[held].picked(arrays, trust)
            for full in wanted:
                if self._of[full] == held:
                    picked.vet(found[full])
                    if isinstance(found[full], Unbuilt):
                        raise FormatError(f"{full!r} cannot be built from what is stored of it")
                    made[full] = found[full]
        return made
