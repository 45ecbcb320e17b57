"""Maps the files of one DeepSpeed checkpoint to logical tensors: finds the ranks' files that hold a range.

A flat tensor in a rank's file holds ranges of many parameters. Their places follow from the parameters' shapes and the
number of ranks, so a file is opened only when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from datastates._base.columns import U64
from datastates.commit.claims import key_hash, object_hash
from datastates.container import checksums
from datastates.container.file import Container, open_container
from datastates.container.index import StoredObject
from datastates.container.pickle_writer import body, dumps
from datastates.container.table import Row, table_of
from datastates.errors import FormatError
from datastates.providers.optimizer.stored_states import state_key
from datastates.reading.stored import Head, Stored
from datastates.restoring.request import RestoreRequest
from datastates.restoring.saved_state import SavedState
from datastates.state.flat_layout import FlatLayout, Name
from datastates.state.parts import Part
from datastates.state.shards import ArrayRef, full_key
from datastates.storage import Location

GROUPS = "param_groups"


class StateFile:
    """An opened file that this package saved for DeepSpeed.

    Attributes:
        container: The file.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            FormatError: Another program wrote the file, or it is damaged; the message names it and says what to do.
            StorageError: The file cannot be read.
        """
        try:
            self.container = open_container(Location(path))
        except FormatError as error:
            raise FormatError(
                f"{error}: only what datastates has saved can be loaded on another number of ranks. Load this "
                "checkpoint by engine.load_checkpoint() on as many ranks as saved it, or convert it by "
                "python -m deepspeed.checkpoint.ds_to_universal"
            ) from error
        head = Head(Location(path), 0, "", 1, None, None)
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
        self._rows: dict[int, tuple[Container, dict[str, Row]]] = {}
        self.tensors = {
            self.key(parameter, state): _Tensor(i, parameter, shape, state)
            for i, flat in enumerate(flats)
            for parameter, shape in flat.parameters
            for state in flat.states
        }

    def key(self, parameter: Name, state: str) -> str:
        """The full key of one state of one parameter."""
        return full_key(self.name, state_key(parameter, state))

    def describe(self, key: str) -> Row | None:
        """A row without elements that describes the logical tensor of a full key; the row itself for a number."""
        tensor = self.tensors.get(key)
        if tensor is None:
            return None
        row = self.flats[tensor.flat].states[tensor.state]
        if row.shape == ():
            return replace(row, key=key)
        return replace(row, key=key, shape=(0,), stride=(1,), global_shape=tensor.shape, box=None, flat=(0, 0))

    def sources(self, key: str, begin: int, end: int) -> Iterator[tuple[Container, Row]]:
        """Files and rows with elements ``begin`` to ``end - 1``; for a number, from the rank of the first element."""
        tensor = self.tensors[key]
        for rank in self.flats[tensor.flat].holders(tensor.name, tensor.shape, begin, end):
            source, rows = self._of_rank(rank)
            if key in rows:
                yield source, rows[key]

    def _of_rank(self, rank: int) -> tuple[Container, dict[str, Row]]:
        if rank not in self._rows:
            source, arrays = self._open_rank(rank)
            rows: dict[str, Row] = {}
            for flat, found in zip(self.flats, arrays, strict=True):
                self._add(rows, flat, flat.layout(rank), found, source.path)
            self._rows[rank] = source, rows
        return self._rows[rank]

    def _add(
        self, rows: dict[str, Row], flat: Flat, layout: FlatLayout, arrays: Mapping[str, Row], path: Location
    ) -> None:
        end = max((piece.at + piece.end - piece.begin for piece in layout.slices), default=0)
        for state, expected in flat.states.items():
            row = arrays.get(state)
            if row is None or (row.dtype, len(row.shape)) != (expected.dtype, len(expected.shape)):
                raise FormatError(f"{path}: {state!r} is not what the file of rank 0 has")
            if row.shape == ():
                keys = [self.key(piece.name, state) for piece in layout.slices if piece.begin == 0]
                rows.update((key, replace(row, key=key)) for key in keys)
                continue
            if row.shape[0] < end or (row.shape[0] > 1 and row.stride != (1,)):
                raise FormatError(f"{path}: {state!r} has {row.shape[0]} elements, not the {end} of its parameters")
            for piece in layout.slices:
                key = self.key(piece.name, state)
                rows[key] = replace(
                    row,
                    key=key,
                    offset=row.offset + piece.at * row.dtype.itemsize,
                    shape=(piece.end - piece.begin,),
                    stride=(1,),
                    global_shape=piece.shape,
                    box=None,
                    flat=(piece.begin, piece.end),
                    digest=None,
                )


@dataclass(frozen=True, slots=True, eq=False)
class _Groups(Container):
    """A file in the role of the container that holds the object ``param_groups`` and no arrays."""

    opcodes: bytes

    def read_object(self, stored: StoredObject) -> bytes:
        """The pickle opcodes of the groups, which were read and verified before."""
        del stored
        return self.opcodes


class ZeroFiles(Stored):
    """A checkpoint of DeepSpeed as logical tensors, for :class:`datastates.restoring.restore.Restore`."""

    def __init__(self, path: Path, ranks: int, first: Container, sections: Sequence[Section]) -> None:
        """Describe the checkpoint.

        Args:
            path: Its folder.
            ranks: The number of ranks that saved it.
            first: Any file of it.
            sections: Its part for each provider.
        """
        super().__init__(Head(Location(path), 0, "", ranks, None, None))
        self._first = first
        self._sections = {section.name: section for section in sections}

    def base(self, provider: str, rank: int) -> Container | None:
        """The file in the role of the provider's container, the same for all ranks; None for another provider."""
        del rank
        section = self._sections.get(provider)
        if section is None:
            return None
        opcodes = body(dumps(list(section.groups)))
        first = self._first
        entry = StoredObject(0, GROUPS, 0, len(opcodes), checksums.crc32(opcodes))
        index = replace(first.index, shards=table_of([provider], [], []), objects=(entry,))
        return _Groups(first.path, first.nbytes, index, first.index_crc, first.index_offset, opcodes)

    def _section(self, full: str) -> Section | None:
        return next((s for s in self._sections.values() if full in s.tensors), None)

    def find(self, full: str) -> Row | None:
        """A row that describes the logical tensor of a full key; opens no file."""
        section = self._section(full)
        return None if section is None else section.describe(full)

    def sources(self, wanted: Sequence[tuple[Row, Part]]) -> list[list[tuple[Container, Row]]]:
        """For each part of a logical tensor, the files and rows that hold elements of it."""
        found = []
        for like, part in wanted:
            section, (begin, end) = self._section(like.key), part.bounds
            found.append([] if section is None or begin == end else list(section.sources(like.key, begin, end)))
        return found

    def every_key(self, provider: str) -> list[str]:
        """The keys of all arrays of a provider, within it; opens no file."""
        section = self._sections[provider]
        return [state_key(tensor.name, tensor.state) for tensor in section.tensors.values()]

    def strangers(self, wanted: U64, providers: Any) -> list[str]:
        """Full keys that these providers have and no rank wants."""
        taken = set(wanted.tolist())
        found = []
        for name in providers:
            found += [key for key in self._sections[name].tensors if key_hash(key) not in taken]
            found += [key for key in [full_key(name, GROUPS)] if object_hash(key) not in taken]
        return sorted(found)

    def has_lost(self, full: str, rank: int) -> bool:
        """False: opening a missing file is an error."""
        del full, rank
        return False

    def digest(self, full: str) -> int | None:
        """None: DeepSpeed's files have no digests of logical tensors."""
        del full
        return None
