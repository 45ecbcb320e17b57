"""The live arrays of one provider, each found in a checkpoint by its name alone."""

from __future__ import annotations

from collections.abc import Sequence

from datastates.container.table import Row
from datastates.restoring.compared import Compared
from datastates.restoring.renaming import LiveKeys
from datastates.restoring.selection import Cut, is_inner
from datastates.restoring.sources import Tensors
from datastates.state import arrays
from datastates.state.provider import StateProvider
from datastates.state.shards import Shard, full_key


class NamedArrays(Compared):
    """The arrays of one provider whose keys differ from those of the checkpoint.

    The provider is not asked to restore any object: its other values than arrays stay as they are.
    """

    def __init__(
        self, stored: Tensors, provider: StateProvider, live: LiveKeys, *, cut: Cut | None, cast: bool
    ) -> None:
        """Compare nothing yet.

        Args:
            stored: The checkpoint.
            provider: The provider.
            live: Which array of the checkpoint belongs to each live one.
            cut: The selected part of the provider; None for all of it.
            cast: Whether arrays of another floating-point type are converted.
        """
        super().__init__(stored, provider.name, cut=cut, cast=cast)
        self._provider = provider
        self._live = live
        self._refused: dict[str, str] = {}  # by key, why it cannot be restored

    def stored_key(self, key: str) -> str:
        """The full key in the checkpoint of an array that it has, by its key within the provider."""
        return self._live.stored[full_key(self.name, key)]

    def find(self, key: str) -> Row | None:
        """A row with any part of an array, by the key within the provider; None if there is none."""
        return self._stored.find(self.stored_key(key)) if self._has(key) else None

    def destinations(self) -> Sequence[Shard]:
        """The live arrays that the checkpoint has. Reports those that it lacks, and those that are not live.

        It may have one of several arrays that are the same memory, as tied weights are: none of these is missing then.
        """
        every = self._provider.arrays_by_name(self._refused.__setitem__)
        shards = [shard for shard in every if not shard.is_object and not is_inner(shard.key)]
        found = [shard for shard in shards if self._has(shard.key)]
        places = {_place(shard) for shard in found if self._takes(shard.key)}
        lacking = (s.key for s in shards if not self._has(s.key) and _place(s) not in places)
        live = {shard.key for shard in shards} | self._refused.keys()
        self.report(
            missing=list(dict.fromkeys(lacking)),  # several shards may be parts of one array
            unexpected=[key for key in self._live.of_provider(self.name) if key not in live],
            mismatched={key: why for key, why in self._refused.items() if self._has(key)},
        )
        return found

    def hand_over(self) -> None:
        """Give the provider its arrays."""
        self._provider.take_arrays(self.restored)

    def _has(self, key: str) -> bool:
        return full_key(self.name, key) in self._live.stored


def _place(shard: Shard) -> tuple[object, ...]:
    return arrays.address(shard.source), shard.dtype, shard.shape, shard.stride
