"""Compares one provider's live arrays with a checkpoint in which each array is found by its name alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from datastates._base.cached import cached_property
from datastates.container.table import Row
from datastates.reading.stored import Stored
from datastates.reading.stored_composed import StoredComposed
from datastates.reading.tensors import ComposedTensors, Tensors
from datastates.restoring.compared import Compared, References
from datastates.restoring.renaming import LiveKeys
from datastates.restoring.request import RestoreRequest
from datastates.restoring.selection import Cut
from datastates.state import arrays
from datastates.state.keys import around, is_inner, parts
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import ArrayRef, Shard, full_key


class NamedArrays(Compared, Saved):
    """Compares one provider's live arrays with stored arrays that have other keys, or come from another format.

    The provider is not asked to restore any object: its values that are no arrays stay as they are.
    """

    def __init__(
        self, stored: Tensors, provider: StateProvider, live: LiveKeys, request: RestoreRequest, cut: Cut | None
    ) -> None:
        """Begin without findings; :meth:`plan` compares.

        Args:
            stored: The checkpoint's tensors.
            provider: The provider, which has ``takes_parts`` set.
            live: Tells which array of the checkpoint belongs to each live array.
            request: The options of the restore.
            cut: The selected part of the provider; None for all of it.
        """
        super().__init__(stored, provider.name, request, cut)
        self.ranks = stored.head.ranks if isinstance(stored, Stored) else 1
        self._provider = provider
        self._live = live

    def arrays(self) -> Mapping[str, ArrayRef]:
        """The stored arrays by their keys in the live state, each as its whole logical tensor."""
        return References(dict.fromkeys(self.every_key()), self.find)

    def every_key(self) -> Sequence[str]:
        """Keys, in the live state, of the stored arrays of all ranks."""
        return self._live.of_provider(self.name)

    def sharing(self, keys: Sequence[str]) -> Sequence[Mapping[str, int]]:
        """Nothing: arrays that are found by name are restored one by one."""
        del keys
        return []

    def objects(self) -> Sequence[str]:
        """No keys: objects are not restored by name."""
        return []

    def structure(self, key: str) -> object:
        """Raise KeyError: objects are not restored by name."""
        raise KeyError(key)

    def structures_beside(self, key: str, arrays: Sequence[str]) -> Iterator[object]:
        """Nothing: objects are not restored by name."""
        return iter(())

    def stored_key(self, key: str) -> str:
        """The full key that a live array has in the checkpoint, given its key; raises KeyError if it is not there."""
        return self._live.stored[full_key(self.name, key)]

    def find(self, key: str) -> Row | None:
        """Find a row with any part of a stored array, by the array's key within the provider; None if there is none."""
        return self._stored.find(self.stored_key(key)) if self._has(key) else None

    def destinations(self) -> Sequence[Shard]:
        """The live arrays that the checkpoint has. Arrays that only one of both sides has are reported.

        Of several live arrays that are the same memory, as tied weights are, the checkpoint needs one only.
        """
        every = self._provider.arrays_by_name(self)
        shards = [shard for shard in every if not is_inner(shard.key) or self._has(shard.key)]
        found = [shard for shard in shards if self._has(shard.key)]
        places = {_place(shard) for shard in found if self._takes(shard.key)}
        lacking = (s.key for s in shards if not self._has(s.key) and _place(s) not in places)
        absent = list(dict.fromkeys(lacking))  # several shards may be parts of one array
        composed = self.composed()
        self.report(
            missing=[key for key in absent if key not in composed],
            mismatched={
                key: f"a {self.kind(key)} in the checkpoint, a tensor in the live state"
                for key in absent
                if key in composed
            },
        )
        live = {full_key(self.name, shard.key) for shard in shards} | self.mismatched.keys()
        stored = dict.fromkeys(key for key in self.every_key() if full_key(self.name, key) not in live)
        whole = dict.fromkeys(outer[0] if (outer := around(key)) else key for key in stored)
        self.report(unexpected=[key for key in whole if full_key(self.name, key) not in live])
        if wanted := composed.keys() & {outer[0] for shard in found if (outer := around(shard.key))}:
            assert self._sources is not None
            self._sources.vet([self._composed[key][0] for key in wanted], self._request.trust)
        return found

    @cached_property
    def _sources(self) -> ComposedTensors | None:
        """The tensors of the checkpoint that consist of others, and can be built."""
        if not isinstance(self._stored, Stored):
            return self._stored.composed
        inside = [self.stored_key(key) for key in self.every_key() if is_inner(key)]
        return StoredComposed(self._stored, {str(parts(key.partition("/")[0])[0]) for key in inside})

    @cached_property
    def _composed(self) -> dict[str, tuple[str, list[str]]]:
        """By its key: a selected tensor that consists of others, as its full key there, and the keys of its arrays."""
        made: dict[str, tuple[str, list[str]]] = {}
        begin, stored = full_key(self.name, "") + "/", self._sources
        for full, inside in () if stored is None else stored.arrays.items():
            live = [self._live.live[key] for key in inside if key in self._live.live]
            keys = [key.removeprefix(begin) for key in live if key.startswith(begin)]
            outer = around(keys[0]) if keys else None
            if outer is not None and (self.cut is None or self.cut.keeps(outer[0])):
                made[outer[0]] = full, keys
        return made

    def composed(self) -> Mapping[str, Sequence[str]]:
        """The stored tensors that consist of others, each with the keys of these."""
        return {key: keys for key, (_, keys) in self._composed.items()}

    def kind(self, key: str) -> str:
        """The name of the class of one of :meth:`composed`."""
        assert self._sources is not None
        return self._sources.kind(self._composed[key][0])

    def built(self, arrays: Mapping[str, object]) -> Mapping[str, Any]:
        """Build those of :meth:`composed` all of whose arrays are given."""
        if self._sources is None or not arrays:
            return {}
        stored = {self.stored_key(key): array for key, array in arrays.items()}
        made = self._sources.build(stored, self._request.trust)
        return {key: made[full] for key, (full, _) in self._composed.items() if full in made}

    def hand_over(self) -> None:
        """Give the provider its filled arrays."""
        self._provider.take_arrays(self.restored, self)

    def _has(self, key: str) -> bool:
        return full_key(self.name, key) in self._live.stored


def _place(shard: Shard) -> tuple[object, ...]:
    return arrays.address(shard.source), shard.dtype, shard.shape, shard.stride
