"""The way up: manifest open → container → planner → executor → providers, and whole checkpoints without providers."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from datastates import arrays, collector, container, pickling, unpickling
from datastates.errors import FormatError, ProviderError, RestoreError
from datastates.executor import Executor, read_bytes
from datastates.opened import Container, only, open_all, open_checkpoint
from datastates.pickling import StoredArray
from datastates.protocol import ArrayRef, Saved, Shard, StateProvider, full_key, walk_unique
from datastates.reads import Reads, reference
from datastates.shard_table import Row, ShardTable

Trust = Collection[str] | str
"""``"all"``, or the classes, as ``module.qualname``, that objects in a checkpoint may be of."""


class Restored(int):
    """The step that was restored, and with ``strict=False`` what was left as it was.

    Attributes:
        missing_keys: Keys that the state has and the checkpoint lacks.
        unexpected_keys: Keys that the checkpoint has and the state lacks.
        mismatched_keys: Keys whose shape, dtype or container type differs, each with the difference.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    mismatched_keys: dict[str, str]


# --- restoring into providers
# ------------------------------------------------------------------------------------------

_Place = tuple[str, int, str, tuple[int, ...], tuple[int, ...]]


def _place_of(row: Row) -> _Place:
    return str(row.record), row.offset // row.dtype.itemsize, row.dtype.name, row.shape, row.stride


def _place_in_pickle(stored: StoredArray) -> _Place:
    return stored.record, stored.offset, stored.dtype, stored.shape, stored.stride


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say in a plain FormatError what could not be decoded; its subclasses say so themselves."""
    try:
        yield
    except FormatError as error:
        if type(error) is not FormatError:
            raise
        raise FormatError(f"{what}: {error}") from error


class _Rows(Mapping[str, Row]):
    """One provider's rows by key, each made when it is asked for."""

    def __init__(self, table: ShardTable, provider: str) -> None:
        self._table = table
        self._numbers = {table.keys[i]: i for i in table.of_provider(provider)}
        self._made: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def __getitem__(self, key: str) -> Row:
        row = self._made.get(key)
        if row is None:
            row = self._made[key] = self._table.row(self._numbers[key])
        return row

    def make(self, keys: Sequence[str]) -> None:
        """Make those rows at once, which is cheaper than one by one."""
        new = [key for key in keys if key in self._numbers and key not in self._made]
        self._made.update(zip(new, self._table.rows([self._numbers[key] for key in new]), strict=True))


class _References(Mapping[str, ArrayRef]):
    """One provider's rows as providers see them."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> ArrayRef:
        return reference(self._rows[key], key=key)


_PLAIN = {int, float, str, bool, type(None)}


def _fill(value: object, resolve: Callable[[ArrayRef], object]) -> bool:
    """Put arrays in the place of references in a surveyed dict or list; False when there is more to it than those."""
    left = [value]
    seen: set[int] = set()
    while left:
        container: Any = left.pop()
        if type(container) not in (dict, OrderedDict, list):
            return False
        if id(container) in seen:
            continue
        seen.add(id(container))
        for k, item in container.items() if isinstance(container, dict) else enumerate(container):
            if type(item) is ArrayRef:
                container[k] = resolve(item)
            elif type(item) not in _PLAIN and not (type(item) is tuple and set(map(type, item)) <= _PLAIN):
                left.append(item)
    return True


class _Saved(Saved):
    """One provider's part of a container; collects what is reported about it."""

    def __init__(self, source: Container, provider: StateProvider, *, strict: bool, trust: Trust) -> None:
        self.strict = strict
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: dict[str, str] = {}
        self._source = source
        self._trust = trust
        self._name = provider.name
        table = source.index.shards
        self.rows = _Rows(table, provider.name)
        self._objects = {o.key: o for o in source.index.objects if table.providers[o.provider] == provider.name}
        self._streams: dict[str, bytes] = {}
        self._surveyed: dict[str, tuple[Any, bool]] = {}

    @cached_property
    def _keys(self) -> dict[_Place, str]:
        self.rows.make(list(self.rows))
        return {_place_of(row): key for key, row in self.rows.items()}

    def arrays(self) -> Mapping[str, ArrayRef]:
        return _References(self.rows)

    def objects(self) -> Sequence[str]:
        return list(self._objects)

    def report(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        self.missing += [full_key(self._name, key) for key in missing]
        self.unexpected += [full_key(self._name, key) for key in unexpected]
        self.mismatched.update({full_key(self._name, key): what for key, what in (mismatched or {}).items()})

    def structure(self, key: str) -> object:
        return self._survey(key)[0]

    def _survey(self, key: str) -> tuple[Any, bool]:
        if key not in self._surveyed:
            with self._named(key):
                self._surveyed[key] = unpickling.survey(self._stream(key), self._reference, trust=self._trust)
        return self._surveyed[key]

    def vet(self, key: str) -> None:
        """Refuse an object that is not trusted, or damaged."""
        self._survey(key)

    def build(self, key: str, targets: Mapping[_Place, object]) -> object:
        """The object over the arrays that have been restored; what was not stays a reference."""
        value, complete = self._survey(key)
        if complete and _fill(value, lambda ref: targets.get(_place_of(self.rows[ref.key]), ref)):
            return value

        def resolve(stored: StoredArray) -> object:
            found = targets.get(_place_in_pickle(stored))
            return self._reference(stored) if found is None else found

        with self._named(key):
            return unpickling.loads(self._stream(key), resolve, trust=self._trust)

    def _stream(self, key: str) -> bytes:
        if key not in self._streams:
            self._streams[key] = pickling.stream(self._source.read_object(self._objects[key]))
        return self._streams[key]

    def _reference(self, stored: StoredArray) -> ArrayRef:
        key = self._keys.get(_place_in_pickle(stored))
        if key is None:
            raise FormatError(f"an array of record {stored.record!r} that the index does not list")
        return reference(self.rows[key], key=key, requires_grad=stored.requires_grad)

    def _named(self, key: str) -> contextlib.AbstractContextManager[None]:
        return _naming(f"{full_key(self._name, key)!r} in {self._source.path}")

    def compare(self, shards: Sequence[Shard]) -> list[tuple[Row, Shard]]:
        """The array shards that can be restored, with their rows; the others are reported."""
        fitting = []
        self.rows.make([shard.key for shard in shards if not shard.is_object])
        for shard in shards:
            if shard.key not in (self._objects if shard.is_object else self.rows):
                raise ProviderError(f"destinations() gave {shard.key!r}, which the checkpoint does not hold")
            if shard.is_object:
                continue
            row = self.rows[shard.key]
            stored, wanted = (row.dtype.name, row.shape), (shard.dtype, shard.shape)
            if stored != wanted:
                texts = [f"{dtype} of shape {shape}" for dtype, shape in (stored, wanted)]
                self.report(mismatched={shard.key: f"{texts[0]} in the checkpoint, {texts[1]} in the live state"})
            elif not arrays.is_writable(shard.source):
                self.report(mismatched={shard.key: "the live array is read-only"})
            else:
                fitting.append((row, shard))
        return fitting


@collector.paused()
def restore(
    path: Path, providers: Sequence[StateProvider], executor: Callable[[int], Executor], *, strict: bool, trust: Trust
) -> Restored:
    """Restore one checkpoint directory into providers, in place; everything is compared before anything is changed.

    ``executor`` gives the executor to use, told how many bytes will be read.
    """
    opened, containers = open_checkpoint(path)
    source = only(path, containers)
    known = {provider: _Saved(source, provider, strict=strict, trust=trust) for provider in walk_unique(providers)}
    reads = Reads(source)
    objects: list[tuple[StateProvider, Shard, Callable[[], object]]] = []
    for provider, saved in known.items():
        if provider.name not in source.index.shards.providers:
            saved.report(missing=[""])
            continue
        shards = provider.destinations(saved)
        targets: dict[_Place, object] = {}
        for row, shard in saved.compare(shards):
            reads.add(row, shard)
            targets[_place_of(row)] = shard.source
        for shard in shards:
            if shard.is_object:
                saved.vet(shard.key)  # what is not trusted or damaged is refused before anything is changed
                objects.append((provider, shard, partial(saved.build, shard.key, targets)))
    result = _left_over(opened.step, known.values())
    if strict and (result.missing_keys or result.unexpected_keys or result.mismatched_keys):
        raise RestoreError(
            f"{path} does not fit the live state: {_sentence(result)}",
            missing=result.missing_keys,
            unexpected=result.unexpected_keys,
            mismatched=[f"{key}: {what}" for key, what in result.mismatched_keys.items()],
        )
    if (offset := reads.conflict()) is not None:
        keys = source.name_record(int(np.searchsorted(source.index.data_offset, offset, side="right")) - 1)
        raise RestoreError(
            f"{path} does not fit the live state: {keys} shares live memory with a tensor that was saved apart from it",
            mismatched=[keys],
        )
    reads.run(executor(sum(reads.lengths)))
    for provider, shard, build in objects:
        provider.restore(shard, build())
    return result


def _left_over(step: int, saved: Collection[_Saved]) -> Restored:
    result = Restored(step)
    result.missing_keys = [key for s in saved for key in s.missing]
    result.unexpected_keys = [key for s in saved for key in s.unexpected]
    result.mismatched_keys = {key: what for s in saved for key, what in s.mismatched.items()}
    return result


def _sentence(result: Restored) -> str:
    def shown(keys: Sequence[str]) -> str:
        return ", ".join(map(repr, keys[:8])) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")

    parts = []
    if result.missing_keys:
        parts.append(f"the checkpoint lacks {shown(result.missing_keys)}")
    if result.unexpected_keys:
        parts.append(f"the live state lacks {shown(result.unexpected_keys)}")
    parts += [f"{key!r}: {what}" for key, what in list(result.mismatched_keys.items())[:8]]
    return "; ".join(parts)


# --- loading without providers
# -----------------------------------------------------------------------------------------


@collector.paused()
def load(path: Path, executor: Callable[[int], Executor], *, trust: Trust) -> dict[str, Any]:
    """Read a checkpoint directory, or one container file, as nested host arrays and objects."""
    source = only(path, open_all(path))
    data = _read_pickle(source)
    records = _Records(source)
    with _naming(str(source.path)):
        # over arrays that are still to be read: what is not trusted or damaged is refused before
        value, complete = unpickling.survey(data, records.array, trust=trust)
        if not isinstance(value, dict):
            raise FormatError(f"data.pkl holds a {type(value).__name__}, not a mapping of providers")
        records.read(executor)
        result: dict[str, Any] = value if complete else unpickling.loads(data, records.array, trust=trust)
        return result


class _Records:
    """Every storage record in fresh host memory, and the arrays that lie in it, sharing it."""

    def __init__(self, source: Container) -> None:
        self._source = source
        table = source.index.shards
        self._rows = {_place_of(row): row for row in map(table.row, range(len(table)))}
        kinds = {row.record: row.kind for row in self._rows.values() if row.kind != "torch"}
        # a torch block has views of both kinds
        kinds |= {row.record: row.kind for row in self._rows.values() if row.kind == "torch"}
        sizes = source.index.record_nbytes.tolist()
        self._blocks = [arrays.allocate(kinds.get(r, "numpy"), n) for r, n in enumerate(sizes)]
        self._made: dict[_Place, Any] = {}

    def array(self, stored: StoredArray) -> object:
        """The array that an object refers to; tied ones are one."""
        place = _place_in_pickle(stored)
        if place not in self._made:
            if place not in self._rows:
                raise FormatError(f"an array of record {stored.record!r} that the index does not list")
            row = self._rows[place]
            self._made[place] = arrays.view(self._blocks[row.record], reference(row), row.offset)
        return arrays.with_grad(self._made[place], stored.requires_grad)

    def read(self, executor: Callable[[int], Executor]) -> None:
        """Fill all records, verified."""
        reads = Reads(self._source)
        for block, offset in zip(self._blocks, self._source.index.data_offset.tolist(), strict=True):
            reads.add_memory(offset, arrays.memory(block))
        reads.run(executor(sum(reads.lengths)))


def _read_pickle(source: Container) -> bytes:
    """The whole of ``data.pkl``, verified; raises CorruptError that names the object, if it is one, that is damaged."""
    index = source.index
    data = read_bytes(source.path)(index.pickle_offset, index.pickle_nbytes)
    if container.crc32(data) != index.pickle_crc:
        for stored in index.objects:
            source.read_object(stored)
        raise source.corrupt("data.pkl")
    return data
