"""Compares one provider's live arrays with a checkpoint: finds the arrays to read and to convert, and differences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from datastates._base.columns import I64, Bools
from datastates.commit.claims import key_hash
from datastates.container.rows import logical
from datastates.container.table import Row
from datastates.errors import ProviderError
from datastates.reading.casting import Cast, are_convertible, can_cast
from datastates.reading.matching import Live, match
from datastates.reading.reads import Reads
from datastates.reading.tensors import Found, FoundRow, Held, Tensors
from datastates.restoring.request import RestoreRequest
from datastates.restoring.selection import Cut
from datastates.state import arrays, memory
from datastates.state.destinations import Destinations
from datastates.state.parts import uncovered
from datastates.state.shards import ArrayRef, Described, Shard, full_key, keys_of


class Compared(ABC):
    """Compares the live arrays of one provider with a checkpoint. Subclasses say how an array is found there.

    Attributes:
        name: The provider's name in messages.
        missing, unexpected: Full keys that only the live state has, and full keys that only the checkpoint has.
        mismatched: By full key, the difference between the live and the stored array, as text.
        lost: By full key, the missing amount of an array or object whose container is missing, as text.
        cut: The selected part of the provider; None if all of it is restored.
        casts: The arrays that are converted because their element types differ.
    """

    def __init__(self, stored: Tensors, name: str, request: RestoreRequest, cut: Cut | None) -> None:
        """Begin without findings; :meth:`plan` compares.

        Args:
            stored: The checkpoint's tensors.
            name: The provider's name in messages.
            request: The options of the restore.
            cut: The selected part of the provider; None for all of it.
        """
        self.name = name
        self.cut = cut
        self.casts: list[Cast] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self.strict = request.strict
        self._request = request
        self._stored = stored
        self._asked: Sequence[str] = ()
        self._given: Sequence[Shard] = ()  # the arrays that it asked for, and perhaps objects after them
        self._made: dict[int, Shard] = {}  # those of them that needed an object, by number
        self._restored: Sequence[int] = ()

    @abstractmethod
    def find(self, key: str) -> Row | None:
        """Find a row with any part of a stored array, by the array's key within the provider; None if there is none."""

    def find_each(self, keys: Sequence[str]) -> Sequence[Row | None]:
        """Find a row of each of several arrays; see :meth:`find`."""
        return [self.find(key) for key in keys]

    def near(self, keys: Sequence[str]) -> Sequence[Held]:
        """Rows of some arrays that are known without a look-up; their parts are numbers in ``keys``."""
        del keys
        return []

    def stored_key(self, key: str) -> str:
        """The full key that a live array has in the checkpoint, given its key within the provider."""
        return full_key(self.name, key)

    def report(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        """Record differences in selected keys; see :meth:`datastates.state.provider.Saved.report`."""
        self.missing += [full_key(self.name, key) for key in missing if self._takes(key)]
        self.unexpected += [full_key(self.name, key) for key in unexpected if self._takes(key)]
        found = {full_key(self.name, key): what for key, what in (mismatched or {}).items() if self._takes(key)}
        self.mismatched.update(found)

    def _takes(self, key: str) -> bool:
        return self.cut is None or self.cut.takes(key)

    def select(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """Select a provider's destinations by their keys. All objects stay: their contents are pruned later."""
        if self.cut is None:
            return shards
        if not isinstance(shards, Destinations):
            return [shard for shard in shards if shard.is_object or self.cut.keeps(shard.key)]
        kept = [i for i, key in enumerate(shards.keys) if self.cut.keeps(key)]
        return Destinations([shards.keys[i] for i in kept], [shards.values[i] for i in kept], shards.objects)

    def plan(self, shards: Sequence[Shard], reads: Reads) -> dict[str, object]:
        """Queue the reads of all arrays that can be restored, and record which cannot, and why.

        Args:
            shards: The provider's destinations; objects are passed over.
            reads: Gets the reads.

        Returns:
            The live arrays that are restored, by key.

        Raises:
            ProviderError: A destination is an array that the checkpoint does not hold.
        """
        self._given = shards if isinstance(shards, Described) else [shard for shard in shards if not shard.is_object]
        self._asked = keys_of(shards)
        taken = self._match_tensors(reads)
        if rest := np.flatnonzero(~taken).tolist():
            taken[self._match_shards(self._checked(rest), reads)] = True
        self._restored = np.flatnonzero(taken).tolist()
        return dict(zip(map(self._asked.__getitem__, self._restored), self.rewritten, strict=True))

    def _checked(self, numbers: Sequence[int]) -> list[tuple[int, Row, Shard]]:
        """Compare arrays one by one, and report those that cannot be restored.

        Returns:
            For each array of these numbers that can be: its number, any row of its tensor, and its shard.
        """
        checked: list[tuple[int, Row, Shard]] = []
        for i, row in zip(numbers, self.find_each([self._asked[i] for i in numbers]), strict=True):
            shard = self._made[i] = self._given[i]
            if row is None:
                raise ProviderError(f"destinations() gave {shard.key!r}, which the checkpoint does not hold")
            if (flaw := arrays.flaw(shard)) is not None:
                raise ProviderError(f"destinations() gave {full_key(self.name, shard.key)!r}, which {flaw}")
            found = difference(row, shard)
            if found is not None and not (self._request.cast and can_cast(row, shard)):
                self.report(mismatched={shard.key: found + self._remedy(row, shard)})
            else:
                checked.append((i, row, shard))
        return checked

    def _match_tensors(self, reads: Reads) -> Bools:
        """Queue the reads of torch tensors that fit, without an object for each; returns which these are."""
        given, keys = self._given, self._asked
        near = self.near(keys)
        live = Live.of_tensors(given) if near and isinstance(given, Destinations) else None
        if live is None:
            return np.zeros(len(keys), bool)

        def named(i: int) -> str:
            return self.stored_key(keys[i])

        taken, fits = match(live, near, named, reads)
        if left := np.flatnonzero(fits & ~taken).tolist():
            found = zip(left, self.find_each([keys[i] for i in left]), strict=True)
            likes = {i: like for i, like in found if like is not None}
            every = self._stored.sources([(like, live.part.part(i)) for i, like in likes.items()])
            numbers = np.array([*likes], np.int64)
            taken |= match(live.only(numbers), _at(numbers, every), named, reads)[0]
        return taken

    def _match_shards(self, given: Sequence[tuple[int, Row, Shard]], reads: Reads) -> list[int]:
        """Queue the reads of live arrays that fit, or that can be converted, and record which are lost, and how much.

        Args:
            given: For each array its number, any row of its tensor, and its shard.
            reads: Gets the reads.

        Returns:
            The numbers of the arrays that are restored.
        """
        if not given:
            return []
        live = Live.of_shards([shard for _, _, shard in given])

        def named(i: int) -> str:
            return given[i][1].key

        taken, _ = match(live, self.near([shard.key for _, _, shard in given]), named, reads)
        left = np.flatnonzero(~taken)
        every = self._stored.sources([(given[i][1], given[i][2].part) for i in left.tolist()])
        gathered = match(live.only(left), _at(left, every), named, reads)[0]
        # the rows that were found are made only if one is needed
        rest = [(given[i], every[n]) for n, i in enumerate(left.tolist()) if not gathered[i]]
        for (_, _, shard), found in rest:
            if missing := uncovered(shard.part, [row.part for _, row in found]):
                self.lost[full_key(self.name, shard.key)] = f"{missing} of {shard.part.numel} elements"
        for (_, like, shard), found in rest:
            if full_key(self.name, shard.key) in self.lost:  # no part of the array is restored, then
                continue
            if like.dtype.name != shard.dtype:
                self.casts.append(Cast(like, shard, found))
            else:
                for source, row in found:
                    reads.add(source, row, shard)
        return [i for i, _, shard in given if full_key(self.name, shard.key) not in self.lost]

    def _remedy(self, row: Row, shard: Shard) -> str:
        """The end of a message about a live part that is not restored: what converts it, or keeps it from that."""
        if not are_convertible(row, shard):
            return ""
        hindrance = memory.why_not_writable(shard)
        return f", and {hindrance}" if hindrance is not None else "; restore(cast=True) converts it"

    @abstractmethod
    def hand_over(self) -> None:
        """Give the provider its filled arrays, unless it gets them in its objects."""

    @property
    def restored(self) -> Sequence[Shard]:
        """The array shards that are restored, with or without a conversion."""
        return [self._made[i] if i in self._made else self._given[i] for i in self._restored]

    def restored_keys(self) -> Collection[str]:
        """The keys of :attr:`restored`."""
        return {self._asked[i] for i in self._restored}

    @property
    def takes_something(self) -> bool | None:
        """Whether any array is restored; None if the provider wants no array."""
        if self._restored:
            return True
        if self.missing or self.mismatched or self.lost:
            return False
        return True if self._asked else None

    @property
    def rewritten(self) -> Sequence[object]:
        """The live arrays that are restored."""
        if isinstance(self._given, Destinations):
            return [self._given.values[i] for i in self._restored]
        return [self._made[i].source for i in self._restored]

    def wanted(self) -> Iterator[int]:
        """Hashes of the full keys, in the checkpoint, of all arrays that the provider asked for."""
        return (key_hash(self.stored_key(key)) for key in self._asked)


class References(Mapping[str, ArrayRef]):
    """A provider's stored arrays by key: iteration covers those that are listed, a look-up finds all."""

    def __init__(self, listed: Mapping[str, object], find: Callable[[str], Row | None]) -> None:
        """Take the listed keys; ``find`` returns any row of an array."""
        self._listed = listed
        self._find = find

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __contains__(self, key: object) -> bool:
        # the first test is faster: `find` makes a row
        return key in self._listed or (isinstance(key, str) and self._find(key) is not None)

    def __getitem__(self, key: str) -> ArrayRef:
        if (row := self._find(key)) is None:
            raise KeyError(key)
        return logical(row, key=key)


def difference(row: Row, shard: Shard) -> str | None:
    """Say why a live part cannot be restored from the stored logical tensor, for a message; None if it can."""
    stored, wanted = (row.dtype.name, row.global_shape), (shard.dtype, shard.global_shape)
    if stored != wanted:
        texts = [f"{dtype} of shape {shape}" for dtype, shape in (stored, wanted)]
        return f"{texts[0]} in the checkpoint, {texts[1]} in the live state"
    return memory.why_not_writable(shard, row.stride)


def _at(numbers: I64, found: Sequence[Sequence[FoundRow]]) -> Sequence[Held]:
    """The found rows in columns, if there are any, for parts that have these numbers among others."""
    return [Held(h.file, numbers[h.part], h.row) for h in found.held] if isinstance(found, Found) else []
