"""Compares the live state of one provider with its arrays and objects in the containers of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from datastates.commit import health
from datastates.commit.claims import key_hash, object_hash
from datastates.container import pickle_reader, pickle_writer
from datastates.container.file import Container
from datastates.container.pickle_native import read_plain
from datastates.container.rows import StoredRows, logical, place_in_pickle
from datastates.container.table import WHOLE, Row
from datastates.errors import DatastatesError, FormatError, ProviderError, naming
from datastates.reading.fill import as_referred, fill
from datastates.reading.reads import Reads
from datastates.reading.stored import Stored
from datastates.reading.tensors import Held
from datastates.restoring.compared import Compared, References
from datastates.restoring.request import RestoreRequest
from datastates.restoring.selection import Cut
from datastates.state.parts import Part
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef, Shard, StoredArray, full_key, keys_of, objects_of


class SavedState(Compared, Saved):
    """The saved state of one provider in a checkpoint. It also collects the differences that are reported.

    Objects and listed keys come from one container, the base. It is the container with this rank's number or, if that
    has nothing of the provider, another rank's. A look-up by key finds the arrays of all ranks. Not thread-safe.
    """

    _stored: Stored

    def __init__(
        self,
        stored: Stored,
        base: Container,
        name: str,
        request: RestoreRequest,
        cut: Cut | None = None,
    ) -> None:
        """Find the provider's rows and objects in the base container.

        Args:
            stored: The checkpoint.
            base: The base container.
            name: The name under which the provider is stored.
            request: The options of the restore.
            cut: The selected part of the provider; None for all of it.
        """
        super().__init__(stored, name, request, cut)
        self._asked_objects: list[str] = []
        self._has_others = stored.head.containers > 1
        self._base = base
        table = base.index.shards
        self.ranks = stored.head.ranks
        self.rows = StoredRows(base.index, name, self._with_elements)
        self._objects = {o.key: o for o in base.index.objects if table.providers[o.provider] == name}
        self._elsewhere: dict[str, Row | None] = {}  # rows looked up in other containers
        self._holders: dict[str, int] = {}  # the numbers of these containers, where the base lists the array
        self._read: dict[str, bytes] = {}
        self._surveyed: dict[str, tuple[Any, bool]] = {}

    def arrays(self) -> Mapping[str, ArrayRef]:
        """The stored arrays by key, each as its whole logical tensor."""
        return References(self.rows, self.find)

    def every_key(self) -> Sequence[str]:
        """Keys of the provider's stored arrays of all ranks."""
        return self._stored.every_key(self.name)

    def note_lost_objects(self, rank: int) -> None:
        """Record as lost the objects that a rank saved in a missing container. The base has another rank's objects."""
        for key in self._objects:
            if self._takes(key) and self._stored.has_lost(full := full_key(self.name, key), rank):
                self.lost[full] = "what this rank saved of it"

    def find(self, key: str) -> Row | None:
        """Find a row with any part of a stored array, by the array's key within the provider; None if there is none."""
        if key in self.rows:
            return self._row(key) if self._has_others else self.rows[key]
        if key not in self._elsewhere:
            self._elsewhere[key] = self._stored.find(full_key(self.name, key))
        return self._elsewhere[key]

    def find_each(self, keys: Sequence[str]) -> Sequence[Row | None]:
        """Find a row of each of several arrays; see :meth:`find`."""
        self.rows.make(keys)
        if self._has_others:
            self._with_elements([key for key in keys if key in self.rows and _is_left(self.rows[key])])
        return super().find_each(keys)

    def _row(self, key: str) -> Row:
        """A row of an array that the base lists: the base's, or one with elements if another container has them."""
        row = self.rows[key]
        return self._with_elements([key]).get(key, row) if self._has_others and _is_left(row) else row

    def _with_elements(self, keys: Sequence[str]) -> dict[str, Row]:
        """Rows in other containers of arrays that the base has no elements of, as far as these can be opened."""
        if not self._has_others:
            return {}
        asked: dict[int, dict[str, str]] = {}
        holding, known = self._stored.holding, set(self._stored.lost)
        for key in filter(self._takes, keys):
            tensor = None if key in self._elsewhere else holding.find(key_hash(full := full_key(self.name, key)))
            if tensor is not None and (holder := holding.any_holder(tensor)) is not None:
                asked.setdefault(holder, {})[full] = key
        for number in self._openable(asked):
            for full, rows in self._stored.rows(number, list(asked[number])).items():
                self._elsewhere[asked[number][full]] = rows[0]
                self._holders[asked[number][full]] = number
        for number in self._stored.lost.keys() - known:  # whoever needs it looks again
            del self._stored.lost[number]
        return {key: row for key in keys if (row := self._elsewhere.get(key)) is not None}

    def _openable(self, numbers: Collection[int]) -> list[int]:
        """Those among some containers that can be opened. The read of a damaged one tells of it."""
        with contextlib.suppress(DatastatesError):
            self._stored.open_containers(numbers)
            return [number for number in numbers if number not in self._stored.lost]
        found = []
        for number in numbers:
            try:
                self._stored.open_containers([number])
            except DatastatesError as error:
                if not health.is_damage(error):
                    raise
            else:
                found += [] if number in self._stored.lost else [number]
        return found

    def sharing(self, keys: Sequence[str]) -> Sequence[Mapping[str, int]]:
        """The arrays among some that share memory, by memory, each with the offset where it begins, in bytes."""
        found: dict[tuple[int, int], dict[str, int]] = {}
        number, row = self.rows.numbers(keys)
        table = self._base.shards
        is_whole, record = table.part[row] == WHOLE, table.record[row]
        for i in np.flatnonzero((np.bincount(record)[record] > 1) & is_whole).tolist():
            found.setdefault((-1, int(record[i])), {})[keys[number[i]]] = int(table.offset[row[i]])
        if self._stored.head.containers > 1:
            wholly = {keys[i] for i in number[is_whole].tolist()}
            left = [key for key in keys if key not in wholly and key in self.rows and _is_left(self.rows[key])]
            for key, one in self._with_elements(left).items():
                if one.is_whole:
                    found.setdefault((self._holders[key], one.record), {})[key] = one.offset
        return [group for group in found.values() if len(group) > 1]

    def objects(self) -> Sequence[str]:
        """Keys of the stored objects."""
        return list(self._objects)

    def structure(self, key: str) -> object:
        """Read a stored object's containers and plain values, with an ArrayRef for each array."""
        return self._survey(key)[0]

    def structures_beside(self, key: str, arrays: Sequence[str]) -> Iterator[object]:
        """Read the structure of an object from each other rank that saved one of the arrays; see :meth:`structure`."""
        known = self.arrays()
        wanted = [(full_key(self.name, array), Part.whole(known[array].shape)) for array in arrays]
        of = self._stored.head.ranks  # a kept container has no objects: its rank's own has them
        ranks = sorted({number % of for full, part in wanted for number in self._stored.holders(full, part)})
        self._stored.open_containers(ranks)
        for rank in ranks:
            other = self._stored.container(rank)
            if other is None or other is self._base:
                continue
            view = SavedState(self._stored, other, self.name, self._request, self.cut)
            view._elsewhere |= {key: row for key, row in self._elsewhere.items() if row is not None}
            if key in view.objects():
                yield view.structure(key)

    def _survey(self, key: str) -> tuple[Any, bool]:
        if key not in self._surveyed:
            opcodes = self._opcodes(key)
            if (plain := read_plain(opcodes, self.rows, logical=True)) is not None:
                self._surveyed[key] = plain[0], True
                self._prune_survey(key)
                return self._surveyed[key]
            with self._named(key):
                stream = pickle_writer.stream(opcodes)
                self._surveyed[key] = pickle_reader.survey(stream, self._reference, trust=self._request.trust)
            self._prune_survey(key)
        return self._surveyed[key]

    def _prune_survey(self, key: str) -> None:
        if self.cut is not None:
            value, complete = self._surveyed[key]
            self._surveyed[key] = self.cut.prune(value, key), complete

    def vet(self, key: str) -> None:
        """Raise an error if an object is not trusted or is damaged; see :meth:`structure`."""
        self._survey(key)

    def fill(self, key: str, targets: Mapping[str, object]) -> bool:
        """Put live arrays into an object that was read before its arrays; False if it must be built: :meth:`build`."""
        value, complete = self._survey(key)
        return complete and fill(value, lambda ref: _target(targets, ref))

    def build(self, key: str, targets: Mapping[str, object]) -> object:
        """Build an object with the arrays that have been restored. Each other array stays a reference."""

        def resolve(stored: StoredArray) -> object:
            return _target(targets, self._reference(stored))

        with self._named(key):
            return pickle_reader.loads(pickle_writer.stream(self._opcodes(key)), resolve, trust=self._request.trust)

    def _opcodes(self, key: str) -> bytes:
        if key not in self._read:
            self._read[key] = self._base.read_object(self._objects[key])
        return self._read[key]

    def _reference(self, stored: StoredArray) -> ArrayRef:
        key = self.rows.by_place.get(place_in_pickle(stored))
        if key is None:
            raise FormatError(f"an array of record {stored.record!r} that the index does not list")
        return logical(self._row(key), key=key, requires_grad=stored.requires_grad)

    def _named(self, key: str) -> contextlib.AbstractContextManager[None]:
        return naming(f"{full_key(self.name, key)!r} in {self._base.path}")

    def plan(self, shards: Sequence[Shard], reads: Reads) -> dict[str, object]:
        """Queue the reads of all arrays; see :meth:`Compared.plan`.

        Returns:
            The live arrays that are restored, by the keys that references in ``data.pkl`` have.
        """
        self._asked, self._asked_objects = keys_of(shards), [shard.key for shard in objects_of(shards)]
        for key in self._asked_objects:
            if key not in self._objects:
                raise ProviderError(f"destinations() gave {key!r}, which the checkpoint does not hold")
        targets = super().plan(shards, reads)
        return dict(zip(self.rows.names_of(list(targets)), targets.values(), strict=True))

    def near(self, keys: Sequence[str]) -> Sequence[Held]:
        """Rows of the base, one of each array that it has a part of; see :meth:`Compared.near`."""
        return self._stored.placed(self._base, *self.rows.numbers(keys))

    def hand_over(self) -> None:
        """Do nothing: the provider gets its arrays in its objects."""

    @property
    def takes_something(self) -> bool | None:
        """Whether any array is restored or, if the provider has no arrays, any object; None if it wants nothing."""
        found = super().takes_something
        return True if found is None and self._asked_objects else found

    def wanted(self) -> Iterator[int]:
        """Hashes of the full keys of all arrays and objects that the provider asked for."""
        yield from super().wanted()
        for key in self._asked_objects:
            yield object_hash(full_key(self.name, key))


def _is_left(row: Row) -> bool:
    """Whether a row has no elements of an array that has some."""
    return 0 in row.shape and 0 not in row.global_shape


def _target(targets: Mapping[str, object], ref: ArrayRef) -> object:
    """The restored array for a reference, as a parameter if the reference says so; else the reference itself."""
    return as_referred(targets[ref.key], ref) if ref.key in targets else ref
