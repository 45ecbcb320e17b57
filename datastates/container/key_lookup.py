"""Finds rows by their full keys, and rows that have the same key, without making an object for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from datastates._base.columns import U32, U64
from datastates.container.packed_keys import PackedKeys
from datastates.state.shards import full_key


class KeyLookup(Mapping[str, int]):
    """Row numbers by full key: a binary search among hashes, then a comparison of the key itself. Immutable."""

    def __init__(self, providers: Sequence[str], provider: U32, keys: PackedKeys) -> None:
        """Index rows: ``provider`` holds each row's provider number, ``keys`` its key within the provider."""
        self._names = [full_key(name, "") for name in providers]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._provider = provider
        self._keys = keys
        hashes = _hashes(provider, keys)
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]
        # Different keys almost never share a hash by chance, but a hostile file can consist of such keys.
        alike = self._hashes[1:] == self._hashes[:-1]
        shared = np.zeros(len(hashes), bool)
        shared[1:] |= alike
        shared[:-1] |= alike
        same = self._order[shared]
        self._colliding: dict[tuple[int, bytes], int] = {(int(provider[i]), keys.encoded(i)): i for i in same.tolist()}
        self.repeats = len(same) - len(self._colliding)
        """How many rows repeat a key of another row."""

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        """The full keys, in the order of the rows."""
        for number, key in zip(self._provider.tolist(), self._keys, strict=True):
            yield f"{self._names[number]}/{key}" if key else self._names[number]

    def __getitem__(self, full: str) -> int:
        """The number of the row with that full key; raises KeyError when there is none."""
        name, slash, key = full.partition("/") if isinstance(full, str) else ("", "", "")
        number = self._numbers.get(name)
        if number is None or (slash and not key):
            raise KeyError(full)
        wanted = PackedKeys.of([key])
        colliding = self._colliding.get((number, wanted.data))
        if colliding is not None:
            return colliding
        value = _hashes(np.array([number], np.uint32), wanted)[0]
        at = int(np.searchsorted(self._hashes, value))
        if at < len(self._order) and self._hashes[at] == value:
            i = int(self._order[at])
            if (int(self._provider[i]), self._keys.encoded(i)) == (number, wanted.data):
                return i
        raise KeyError(full)


def _hashes(provider: U32, keys: PackedKeys) -> U64:
    return keys.hashes() + provider.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
