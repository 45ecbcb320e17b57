"""Compares one provider's live arrays with a checkpoint: finds the arrays to read and to convert, and differences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from datastates.commit.claims import key_hash
from datastates.container.table import Row
from datastates.errors import ProviderError
from datastates.reading.casting import Cast, are_convertible, can_cast
from datastates.reading.gathering import gather
from datastates.reading.reads import Reads
from datastates.reading.tensors import FoundRow, Tensors
from datastates.restoring.request import RestoreRequest
from datastates.restoring.selection import Cut
from datastates.state import arrays, memory
from datastates.state.arrays import Destinations
from datastates.state.parts import uncovered
from datastates.state.shards import Shard, full_key, keys_of, objects_of


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
        self._shards: Sequence[Shard] = []

    @abstractmethod
    def find(self, key: str) -> Row | None:
        """Find a row with any part of a stored array, by the array's key within the provider; None if there is none."""

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
        kept = [shard for shard in shards if shard.is_object or self.cut.keeps(shard.key)]
        if not isinstance(shards, Destinations):
            return kept
        some = [shard for shard in kept if not shard.is_object]
        return Destinations([s.key for s in some], [s.source for s in some], objects_of(kept))

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
        self._shards = restored = []
        elsewhere: list[tuple[Row, Shard]] = []  # whose file must be looked up, or holds other parts
        self._asked = keys_of(shards)
        several = {key for key, count in Counter(self._asked).items() if count > 1}
        for shard in shards:
            if shard.is_object:
                continue
            row = self.find(shard.key)
            if row is None:
                raise ProviderError(f"destinations() gave {shard.key!r}, which the checkpoint does not hold")
            if (flaw := arrays.flaw(shard)) is not None:
                raise ProviderError(f"destinations() gave {full_key(self.name, shard.key)!r}, which {flaw}")
            found = difference(row, shard)
            is_cast = found is not None and self._request.cast and can_cast(row, shard)
            if found is not None and not is_cast:
                self.report(mismatched={shard.key: found + self._remedy(row, shard)})
            elif not is_cast and shard.key not in several and (held := self._held(row, shard)) is not None:
                reads.add(*held, shard)
                restored.append(shard)
            else:
                elsewhere.append((row, shard))
        every = self._stored.sources([(row, shard.part) for row, shard in elsewhere])
        gathered = gather(every, elsewhere, reads)
        for i, (_, shard) in enumerate(elsewhere):
            if not gathered[i] and (missing := uncovered(shard.part, [row.part for _, row in every[i]])):
                self.lost[full_key(self.name, shard.key)] = f"{missing} of {shard.part.numel} elements"
        for i, (like, shard) in enumerate(elsewhere):
            if full_key(self.name, shard.key) in self.lost:  # no part of the array is restored, then
                continue
            restored.append(shard)
            if like.dtype.name != shard.dtype:
                self.casts.append(Cast(like, shard, every[i]))
            elif not gathered[i]:
                for source, row in every[i]:
                    reads.add(source, row, shard)
        return {shard.key: shard.source for shard in restored}

    def _remedy(self, row: Row, shard: Shard) -> str:
        """The end of a message about a live part that is not restored: what converts it, or keeps it from that."""
        if not are_convertible(row, shard):
            return ""
        hindrance = memory.why_not_writable(shard)
        return f", and {hindrance}" if hindrance is not None else "; restore(cast=True) converts it"

    def _held(self, row: Row, shard: Shard) -> FoundRow | None:
        """The row that has all bytes of a live part, with its file, if it is known without a look-up; else None."""
        del row, shard
        return None

    @abstractmethod
    def hand_over(self) -> None:
        """Give the provider its filled arrays, unless it gets them in its objects."""

    @property
    def restored(self) -> Sequence[Shard]:
        """The array shards that are restored, with or without a conversion."""
        return self._shards

    def restored_keys(self) -> Collection[str]:
        """The keys of :attr:`restored`."""
        return {shard.key for shard in self.restored}

    @property
    def takes_something(self) -> bool | None:
        """Whether any array is restored; None if the provider wants no array."""
        if self._shards:
            return True
        if self.missing or self.mismatched or self.lost:
            return False
        return True if self._asked else None

    @property
    def rewritten(self) -> Sequence[object]:
        """The live arrays that are restored."""
        return [shard.source for shard in self._shards]

    def wanted(self) -> Iterator[int]:
        """Hashes of the full keys, in the checkpoint, of all arrays that the provider asked for."""
        return (key_hash(self.stored_key(key)) for key in self._asked)


def difference(row: Row, shard: Shard) -> str | None:
    """Say why a live part cannot be restored from the stored logical tensor, for a message; None if it can."""
    stored, wanted = (row.dtype.name, row.global_shape), (shard.dtype, shard.global_shape)
    if stored != wanted:
        texts = [f"{dtype} of shape {shape}" for dtype, shape in (stored, wanted)]
        return f"{texts[0]} in the checkpoint, {texts[1]} in the live state"
    return memory.why_not_writable(shard, row.stride)
