"""The keys of an index: packs strings end to end, and finds rows by their full keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from datastates._base.columns import I64, U32, U64, Bools
from datastates.errors import FormatError
from datastates.state.shards import full_key

_LONG = 256
"""Keys of more bytes are hashed one by one, so that one huge key does not cost many passes over all the others."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class PackedKeys(Sequence[str]):
    """Strings as UTF-8 (with lone surrogates) and their lengths in bytes. Immutable.

    Attributes:
        data: The strings, end to end.
        nbytes: Length of each.
    """

    def __init__(self, data: bytes, nbytes: U32) -> None:
        """Keep data and lengths; raises FormatError if the lengths do not add up or a string is not valid UTF-8."""
        self.data = data
        self.nbytes = nbytes
        self._end: I64 = np.cumsum(nbytes, dtype=np.int64)
        if (int(self._end[-1]) if len(nbytes) else 0) != len(data):
            raise FormatError("index: the lengths of the keys do not add up")
        self._check_text()

    @classmethod
    def of(cls, strings: Sequence[str]) -> PackedKeys:
        """Pack strings; returns packed ones as they are."""
        if isinstance(strings, PackedKeys):
            return strings
        text = "".join(strings)
        if text.isascii():
            return cls(text.encode(), np.fromiter(map(len, strings), np.uint32, len(strings)))
        encoded = [_encode(s) for s in strings]
        return cls(b"".join(encoded), np.fromiter(map(len, encoded), np.uint32, len(encoded)))

    def _check_text(self) -> None:
        if self.data.isascii():
            return
        try:
            self.data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise FormatError(f"index: the keys are not text ({error.reason})") from None
        # the whole is valid, and so is each string unless one begins within a character
        start = (self._end - self.nbytes)[self.nbytes > 0]
        if (np.frombuffer(self.data, np.uint8)[start] & 0xC0 == 0x80).any():
            raise FormatError("index: the keys are not text (one ends within a character)")

    def __len__(self) -> int:
        """The number of strings."""
        return len(self.nbytes)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        """The string with this number, or the strings in a slice."""
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        return self.encoded(i).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        """Iterate over all strings."""
        start = 0
        for end in self._end.tolist():
            yield self.data[start:end].decode("utf-8", "surrogatepass")
            start = end

    def some(self, numbers: I64) -> list[str]:
        """The strings with these numbers."""
        if not self.data.isascii():
            return [key.decode("utf-8", "surrogatepass") for key in self.encoded_some(numbers)]
        end, text = self._end[numbers], self.data.decode()
        begin = (end - self.nbytes[numbers]).tolist()
        return [text[a:b] for a, b in zip(begin, end.tolist(), strict=True)]

    def encoded_some(self, numbers: I64) -> list[bytes]:
        """The strings with these numbers, as UTF-8."""
        end = self._end[numbers]
        begin, data = (end - self.nbytes[numbers]).tolist(), self.data
        return [data[a:b] for a, b in zip(begin, end.tolist(), strict=True)]

    def encoded(self, i: int) -> bytes:
        """The string with this number, as UTF-8."""
        end = int(self._end[i])
        return self.data[end - int(self.nbytes[i]) : end]

    def hashes(self) -> U64:
        """A hash of each string; equal strings have equal hashes within this process."""
        nbytes = self.nbytes.astype(np.int64)
        start = self._end - nbytes
        # words[i] is the eight bytes from i on as a number; for the last ones the data is padded
        padded = self.data + bytes(8)
        words: U64 = np.ndarray(len(self.data) + 1, "<u8", padded, 0, (1,))
        # multiplied, as a number of bytes alone would cancel a first word that is equal to it
        result = (nbytes.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
        short = nbytes <= _LONG
        longest = int(nbytes[short].max(initial=0))
        for at in range(0, longest, 8):
            rows = np.flatnonzero(short & (nbytes > at))
            result[rows] = _mixed(result[rows], words[start[rows] + at] & _first_bytes(nbytes[rows] - at))
        for i in np.flatnonzero(~short).tolist():
            result[i] = hash(self.encoded(i)) & 0xFFFFFFFFFFFFFFFF
        return result


def _first_bytes(count: I64) -> U64:
    """Masks that keep the first ``count`` bytes of a little-endian 64-bit number; a larger ``count`` keeps all."""
    masks: U64 = np.uint64(0xFFFFFFFFFFFFFFFF) >> (64 - 8 * np.minimum(count, 8)).astype(np.uint64)
    return masks


def _mixed(state: U64, word: U64) -> U64:
    state = (state ^ word) * _MULTIPLIER
    return state ^ (state >> np.uint64(32))


class KeyLookup(Mapping[str, int]):
    """Row numbers by full key: a binary search among hashes, then a comparison of the key itself. Immutable."""

    def __init__(self, providers: Sequence[str] | None, provider: U32, keys: PackedKeys) -> None:
        """Index rows.

        Args:
            providers: The names of the providers; None if ``keys`` are full keys.
            provider: For each row, the number of its provider.
            keys: For each row, its key within the provider.
        """
        self._names = None if providers is None else tuple(full_key(name, "") for name in providers)
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
        self._colliding: dict[tuple[int, bytes], list[int]] = {}
        for i in sorted(same.tolist()):
            self._colliding.setdefault((int(provider[i]), keys.encoded(i)), []).append(i)
        self.repeated = [rows for rows in self._colliding.values() if len(rows) > 1]
        """For each key that several rows have, the numbers of these rows."""
        self.is_first: Bools = np.ones(len(hashes), bool)
        """For each row, whether no row before it has its key."""
        self.is_first[[i for rows in self.repeated for i in rows[1:]]] = False

    def __len__(self) -> int:
        """The number of different full keys."""
        return int(self.is_first.sum())

    def __iter__(self) -> Iterator[str]:
        """The full keys, each once, in the order of the rows."""
        for is_first, number, key in zip(self.is_first.tolist(), self._provider.tolist(), self._keys, strict=True):
            if not is_first:
                continue
            if self._names is None:
                yield key
            else:
                yield f"{self._names[number]}/{key}" if key else self._names[number]

    def __getitem__(self, full: str) -> int:
        """The number of the first row with this full key; raises KeyError if there is none."""
        return self.find([full])[full][0]

    def find(self, fulls: Sequence[str]) -> dict[str, list[int]]:
        """The numbers of all rows with each of these full keys; keys without a row are left out.

        Looking up many keys at once takes a few microseconds each, one alone takes a hundred.
        """
        asked = list(dict.fromkeys(fulls))
        which, rows = self.rows(AskedKeys(asked))
        found: dict[str, list[int]] = {}
        for n, row in zip(which.tolist(), rows.tolist(), strict=True):
            found.setdefault(asked[n], []).append(row)
        return found

    def rows(self, asked: AskedKeys) -> tuple[I64, I64]:
        """Find the rows with any of the asked keys. Returns two columns, an entry for each row: key and row numbers."""
        which, provider, exact, hashes = asked.of(self._names)
        if not which.size or not self._hashes.size:
            return which[:0], which[:0]
        row = self._order[np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)]
        if self._colliding:
            keys = zip(provider.tolist(), exact, strict=True)
            rows = [self._colliding.get(key, [first]) for key, first in zip(keys, row.tolist(), strict=True)]
            again = np.repeat(np.arange(len(rows)), [len(some) for some in rows])
            which, provider, exact = which[again], provider[again], [exact[i] for i in again.tolist()]
            row = np.concatenate(rows)
        same = np.array([a == b for a, b in zip(self._keys.encoded_some(row), exact, strict=True)], bool)
        same &= self._provider[row] == provider
        return which[same], row[same]


class AskedKeys:
    """Full keys to look up in any number of tables. They are split and hashed once for tables of the same providers."""

    def __init__(self, fulls: Sequence[str]) -> None:
        """Remember the full keys."""
        self._fulls = fulls
        self._known: dict[tuple[str, ...] | None, tuple[I64, U32, list[bytes], U64]] = {}

    def of(self, names: tuple[str, ...] | None) -> tuple[I64, U32, list[bytes], U64]:
        """The keys that may be in a table whose providers have these ``names``; None for a table of full keys.

        Returns:
            Columns with an entry for each such key: its number, its provider's number, key in the provider, and hash.
        """
        if names not in self._known:
            numbers = {name: number for number, name in enumerate(names or ())}
            places = [_place(full, None if names is None else numbers) for full in self._fulls]
            which = np.array([i for i, place in enumerate(places) if place is not None], np.int64)
            provider = np.array([place[0] for place in places if place is not None], np.uint32)
            keys = PackedKeys.of([place[1] for place in places if place is not None])
            exact = keys.encoded_some(np.arange(len(keys)))
            self._known[names] = which, provider, exact, _hashes(provider, keys)
        return self._known[names]


def _place(full: object, numbers: Mapping[str, int] | None) -> tuple[int, str] | None:
    """Split a full key into the provider's number and the key within the provider; None if no row can have it."""
    if numbers is None or not isinstance(full, str):
        return (0, full) if isinstance(full, str) else None
    name, slash, key = full.partition("/")
    number = numbers.get(name)
    return None if number is None or (slash and not key) else (number, key)


def _hashes(provider: U32, keys: PackedKeys) -> U64:
    return keys.hashes() + provider.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
