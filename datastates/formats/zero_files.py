"""Maps the files of one DeepSpeed checkpoint to logical tensors: finds the ranks' files that hold a range.

A flat tensor in a rank's file holds ranges of many parameters. Their places follow from the parameters' shapes and the
number of ranks, so a file is opened only when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from datastates._base.cached import cached_property
from datastates._base.columns import U64
from datastates.commit.claims import key_hash, object_hash
from datastates.container import checksums
from datastates.container.file import Container, open_container
from datastates.container.index import StoredObject
from datastates.container.pickle_writer import body, dumps
from datastates.container.table import Row, table_of
from datastates.errors import FormatError
from datastates.reading.head import Head
from datastates.reading.stored import Stored
from datastates.restoring.request import RestoreRequest
from datastates.restoring.saved_state import SavedState
from datastates.state.flat_layout import FlatLayout, Name
from datastates.state.keys import state_key
from datastates.state.shards import ArrayRef, Shard, full_key
from datastates.storage import Location

GROUPS = "param_groups"


class StateFile:
    """An opened file that this package saved for DeepSpeed.

    Attributes:
        container: The file.
    """

    def __init__(self, path: Location) -> None:
        """Open the file.

        Raises:
            FormatError: Another program wrote the file, or it is damaged; the message names it and says what to do.
            StorageError: The file cannot be read.
        """
        try:
            self.container = open_container(path)
        except FormatError as error:
            raise FormatError(
                f"{error}: only what datastates has saved can be loaded on another number of ranks. Load this "
                "checkpoint by engine.load_checkpoint() on as many ranks as saved it, or convert it by "
                "python -m deepspeed.checkpoint.ds_to_universal"
            ) from error
        head = Head(path, 0, "", 1, 1, {}, None, None)
        provider = self.container.index.shards.providers[0]
        self._saved = SavedState(Stored(head), self.container, provider, RestoreRequest(trust="all"))

    @property
    def attempt(self) -> object:
        """A name that all files of one checkpoint share, and no others."""
        return self.container.index.identity["attempt"]

    @cached_property
    def structure(self) -> dict[str, Any]:
        """The file's value with an ArrayRef for each array; objects of other classes are not built."""
        value: dict[str, Any] = self._saved.structure("")  # type: ignore[assignment]
        return value

    @cached_property
    def value(self) -> dict[str, Any]:
        """The file's value with an ArrayRef for each array."""
        value: dict[str, Any] = self._saved.build("", {})  # type: ignore[assignment]
        return value

    def row(self, ref: ArrayRef) -> Row:
        """The row of an array: its place in the file."""
        return self._saved.rows[ref.key]


@dataclass(frozen=True, eq=False)
class Flat:
    """A flat tensor that is cut over all ranks.

    Attributes:
        parameters: Names and logical shapes, in their order.
        ranks: The number of ranks that saved.
        partition: With ZeRO-1 and ZeRO-2, which lay all parameters end to end: elements of each rank's partition. None
            with ZeRO-3, which cuts each parameter by itself.
        states: The states with this layout, by name, each with a row that gives its type; a number has the shape ().
    """

    parameters: tuple[tuple[Name, tuple[int, ...]], ...]
    ranks: int
    partition: int | None
    states: Mapping[str, Row]

    def layout(self, rank: int) -> FlatLayout:
        """The layout of one rank's partition."""
        if self.partition is None:
            return FlatLayout.each_split(self.parameters, rank, self.ranks)
        return FlatLayout.concatenated(self.parameters, rank, self.ranks, alignment=self.partition)

    @cached_property
    def _begins(self) -> dict[Name, int]:
        begins, at = {}, 0
        for name, shape in self.parameters:
            begins[name] = at
            at += prod(shape)
        return begins

    def holders(self, name: Name, shape: tuple[int, ...], begin: int, end: int) -> range:
        """The ranks that have elements ``begin`` to ``end - 1`` of a parameter; the range must not be empty."""
        if self.partition is None:
            at, length = 0, -(-prod(shape) // self.ranks)
        else:
            at, length = self._begins[name], self.partition
        length = max(length, 1)
        return range((at + begin) // length, min((at + end - 1) // length, self.ranks - 1) + 1)


Arrays = Sequence[Mapping[str, Row]]
"""For each flat tensor, the arrays in one rank's file, by state."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    flat: int
    name: Name
    shape: tuple[int, ...]
    state: str


class Section:
    """The part of a checkpoint for one provider: flat tensors, in one file of each rank.

    Attributes:
        name: The provider's name.
        flats: The flat tensors.
        groups: The value of the object ``param_groups``.
        tensors: The logical tensors, by full key.
    """

    def __init__(
        self,
        name: str,
        flats: Sequence[Flat],
        groups: Sequence[Any],
        open_rank: Callable[[int], tuple[Container, Arrays]],
    ) -> None:
        """Describe the section. ``open_rank`` opens a rank's file and returns it with its arrays."""
        self.name = name
        self.flats = flats
        self.groups = groups
        self._open_rank = open_rank
        self.tensors = {
            full_key(name, state_key(parameter, state)): _Tensor(i, parameter, shape, state)
            for i, flat in enumerate(flats)
            for parameter, shape in flat.parameters
            for state in flat.states
        }

    def container(self, rank: int) -> Container:
        """A rank's file as a container of parts of parameters; raises FormatError if it is not like rank 0's."""
        source, arrays = self._open_rank(rank)
        shards: list[Shard] = []
        records: list[int] = []
        for flat, found in zip(self.flats, arrays, strict=True):
            slices = flat.layout(rank).slices
            end = max((piece.at + piece.end - piece.begin for piece in slices), default=0)
            for state, expected in flat.states.items():
                row = found.get(state)
                if row is None or (row.dtype, len(row.shape)) != (expected.dtype, len(expected.shape)):
                    raise FormatError(f"{source.path}: {state!r} is not what the file of rank 0 has")
                if row.shape and (row.shape[0] < end or (row.shape[0] > 1 and row.stride != (1,))):
                    what = f"{state!r} has {row.shape[0]} elements, not the {end} of its parameters"
                    raise FormatError(f"{source.path}: {what}")
                for piece in slices:
                    shard = Shard(state_key(piece.name, state), row.dtype.name, row.kind, buffer_offset=row.offset)
                    if row.shape:
                        shard = replace(
                            shard,
                            shape=(piece.end - piece.begin,),
                            stride=(1,),
                            global_shape=piece.shape,
                            offset=None,
                            flat=(piece.begin, piece.end),
                            buffer_offset=row.offset + piece.at * row.dtype.itemsize,
                        )
                    elif piece.begin:
                        continue  # the rank of the first element has a parameter's numbers
                    shards.append(shard)
                    records.append(row.record)
        opcodes = body(dumps(list(self.groups)))
        entry = StoredObject(0, GROUPS, 0, len(opcodes), checksums.crc32(opcodes))
        table = table_of([self.name], [(0, shard) for shard in shards], records)
        index = replace(source.index, shards=table, objects=(entry,), pickle_offset=0)
        return replace(source, index=index, pickle=opcodes)


class _Holders:
    """Which files hold which tensors, as :class:`datastates.commit.catalog.Holders`. It opens none."""

    def __init__(self, ranks: int, sections: Sequence[Section]) -> None:
        self._found: list[tuple[int, Flat, _Tensor]] = []  # the number of the section's first file
        self._number: dict[int, int] = {}
        self._groups = [object_hash(full_key(section.name, GROUPS)) for section in sections]
        for i, section in enumerate(sections):
            for full, tensor in section.tensors.items():
                self._number[key_hash(full)] = len(self._found)
                self._found.append((i * ranks, section.flats[tensor.flat], tensor))

    def find(self, key: int) -> int | None:
        return self._number.get(key)

    def holders(self, tensor: int, begin: int, end: int) -> list[int]:
        first, flat, one = self._found[tensor]
        return [first + rank for rank in flat.holders(one.name, one.shape, begin, end)]

    def any_holder(self, tensor: int) -> int | None:
        return next(iter(self.holders(tensor, 0, 1)), None)

    def digest(self, tensor: int) -> None:
        del tensor  # DeepSpeed's files have no digests of logical tensors

    def keys(self) -> U64:
        return np.array([*self._number, *self._groups], np.uint64)


class ZeroFiles(Stored):
    """A checkpoint of DeepSpeed, read as if each rank's file of each section were a container of this package."""

    def __init__(self, path: Location, ranks: int, sections: Sequence[Section]) -> None:
        """Describe the checkpoint; files are opened when they are needed.

        Args:
            path: Its folder.
            ranks: The number of ranks that saved it.
            sections: Its part for each provider.
        """
        count = ranks * len(sections)
        super().__init__(Head(path, 0, "", count, count, {}, None, None))
        self._ranks, self._sections = ranks, sections

    def open_containers(self, ranks: Collection[int], *, needed: bool = False) -> None:
        """Open files: first those of the first section, by rank."""
        del needed  # none may be missing
        for number in ranks:
            if number not in self._opened:
                section, rank = divmod(number, self._ranks)
                self._opened[number] = self._sections[section].container(rank)

    def base(self, provider: str, rank: int) -> Container | None:
        """The section's file of rank 0, for all ranks; None for another provider."""
        del rank
        names = [section.name for section in self._sections]
        return self.container(names.index(provider) * self._ranks) if provider in names else None

    @cached_property
    def holding(self) -> _Holders:
        """Which files hold what."""
        return _Holders(self._ranks, self._sections)

    def every_key(self, provider: str) -> list[str]:
        """The keys of all arrays of a provider, within it; opens no file."""
        (section,) = (section for section in self._sections if section.name == provider)
        return [state_key(tensor.name, tensor.state) for tensor in section.tensors.values()]
