"""The live arrays to restore into, as a sequence of shards that are made only when they are read."""

from __future__ import annotations

from collections.abc import Sequence

from datastates.state import arrays, dtensors
from datastates.state.parts import HeldPart
from datastates.state.shards import Described, Shard


class Destinations(Described):
    """Live arrays to restore into, then object shards; an array is described only when its item is read.

    Attributes:
        keys: The arrays' keys within the provider.
        values: The arrays.
        objects: The object shards.
    """

    def __init__(self, keys: Sequence[str], values: Sequence[object], objects: Sequence[Shard] = ()) -> None:
        """Take the arrays and objects; ``keys`` and ``values`` have the same length."""
        super().__init__(len(keys), objects)
        self._keys = keys
        self.values = values
        self._meshes: dict[int, dtensors.Meshes] = {}  # by id of the mesh, which the values keep alive

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the array shards."""
        return self._keys

    @property
    def memory(self) -> tuple[Sequence[object], list[int]]:
        """The arrays, with DTensors replaced by their local tensors; and the numbers of the DTensors."""
        if not (classes := set(filter(dtensors.is_class, set(map(type, self.values))))):
            return self.values, []
        numbers = [i for i, value in enumerate(self.values) if type(value) in classes]
        return dtensors.unwrap(self.values, classes), numbers

    def part(self, i: int, shape: tuple[int, ...]) -> HeldPart:
        """This rank's part of the array number ``i``; ``shape`` is its shape, of a DTensor its local tensor's."""
        value = self.values[i]
        return self._meshes_of(value).part(self._keys[i], value, shape)

    def array(self, i: int) -> Shard:
        """Describe the array number ``i``, from 0, as a shard to restore into."""
        value = self.values[i]
        return arrays.destination(self._keys[i], value, self._meshes_of(value))

    def _meshes_of(self, value: object) -> dtensors.Meshes:
        mesh = id(dtensors.mesh_of(value))
        if mesh not in self._meshes:
            self._meshes[mesh] = dtensors.Meshes([value])
        return self._meshes[mesh]
