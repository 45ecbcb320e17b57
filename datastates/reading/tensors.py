"""The sources of reads: a checkpoint of any format as its logical tensors, and the files with their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, overload

import numpy as np

from datastates._base.columns import I64, U64
from datastates.container.object_entry import ObjectEntry
from datastates.container.stretches import form, forms
from datastates.container.table import Row, ShardTable
from datastates.errors import CorruptError, FormatError
from datastates.reading.read_queue import Source
from datastates.state.parts import Part


class TensorFile(Source, Protocol):
    """A file with tensors: a :class:`~datastates.container.file.Container`, or a file of another format."""

    @property
    def shards(self) -> ShardTable:
        """The tensors, or parts of tensors, that lie in its records."""

    @property
    def record_nbytes(self) -> U64:
        """Length of each record's data in bytes."""

    @property
    def objects(self) -> Sequence[ObjectEntry]:
        """The entries of its objects, which are no tensors."""

    @property
    def checked(self) -> bool:
        """Whether its chunks have checksums, so that what is read of it is verified on the way."""

    def record_crc(self, record: int) -> int | None:
        """CRC-32 of a whole record; None if it has none."""

    def corrupt(self, key: str) -> CorruptError:
        """The error for damaged data, which ``key`` names in its message."""

    def read_row(self, row: Row) -> memoryview:
        """Read the bytes from a row's first element to its last.

        They are verified where the chunks have checksums, and where the row fills a record that has one.

        Raises:
            CorruptError: They do not match.
            StorageError: Reading failed.
        """


FoundRow = tuple[TensorFile, Row]
"""A row, and the file that it is in."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Rows of one file that may share elements with parts that are wanted: the parts' numbers, and the rows'."""

    file: TensorFile
    part: I64
    row: I64


class Found(Sequence[Sequence[FoundRow]]):
    """For each wanted part, the rows that may share elements with it, each with its file.

    Rows are made when the first one is asked for. Rows without elements are left out.

    Attributes:
        held: The same in columns, an entry for each file.
    """

    def __init__(self, likes: Sequence[Row], held: Sequence[Held]) -> None:
        """Take what was found.

        Args:
            likes: For each wanted part, any row of its tensor.
            held: The rows, an entry for each file.

        Raises:
            FormatError: A file has a tensor with another type or shape.
        """
        self._count = len(likes)
        self.held = held
        width = max((len(like.global_shape) for like in likes), default=0)
        expected = np.array([form(like.dtype, like.global_shape, width) for like in likes], np.int64)
        for one in held:
            odd = (forms(one.file.shards, one.row, width) != expected[one.part]).any(axis=1)
            if odd.any():
                key = likes[int(one.part[odd][0])].key
                raise FormatError(f"{one.file.path}: {key!r} is of another type or shape than in other files")

    def __len__(self) -> int:
        """The number of wanted parts."""
        return self._count

    @overload
    def __getitem__(self, i: int) -> Sequence[FoundRow]: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Sequence[FoundRow]]: ...
    def __getitem__(self, i: int | slice) -> Sequence[FoundRow] | Sequence[Sequence[FoundRow]]:
        """The rows that were found for the part of that number."""
        return self._made[i]

    @cached_property
    def _made(self) -> list[list[FoundRow]]:
        made: list[list[FoundRow]] = [[] for _ in range(self._count)]
        for held in self.held:
            for part, row in zip(held.part.tolist(), held.file.shards.rows(held.row.tolist()), strict=True):
                if 0 not in row.shape:
                    made[part].append((held.file, row))
        return made


class Tensors(Protocol):
    """The logical tensors of one checkpoint, by full key, and where their bytes lie."""

    @property
    def path(self) -> Path:
        """The path of the checkpoint."""

    @property
    def step(self) -> int | None:
        """The step that it was saved at; None if it does not say."""

    @property
    def lost(self) -> Mapping[int, Path]:
        """The paths of files that were needed and are missing, by number."""

    @property
    def keys(self) -> Mapping[str, object]:
        """The full keys, in the order of the files."""

    @property
    def is_listed(self) -> bool:
        """Whether asking for the keys opens no files."""

    def holds(self, full: str) -> bool:
        """Whether there is a tensor with that full key."""

    def find(self, full: str) -> Row | None:
        """A row with any part of the tensor of that full key; None if there is none."""

    def whole(self, fulls: Sequence[str]) -> Sequence[tuple[Row, Sequence[FoundRow]]]:
        """For each full key, any row of its tensor, and all rows that hold elements of it, each with its file.

        A tensor without elements has no such rows.

        Raises:
            KeyError: There is no tensor with one of the keys.
            DatastatesError: Only a part of a tensor is there.
            FormatError: A file is damaged, or the parts of a tensor are of different types or shapes.
            StorageError: A file cannot be read.
        """

    def sources(self, wanted: Sequence[tuple[Row, Part]]) -> Sequence[Sequence[FoundRow]]:
        """The rows that may share elements with parts of tensors, each with its file.

        Args:
            wanted: For each part, any row of its tensor, and the part.

        Returns:
            For each part, its sources.

        Raises:
            FormatError: The parts of a tensor are of different types or shapes.
        """

    def digest(self, full: str) -> int | None:
        """The sum of all parts' contributions to the digest of a tensor; None if one is unknown."""

    def objects(self) -> Mapping[str, ObjectEntry]:
        """The objects, which are no tensors, by full key."""
