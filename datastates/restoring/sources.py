"""What is read from: a checkpoint of any format as its logical tensors, and the files that their bytes lie in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from datastates._base.columns import U64
from datastates.container.object_entry import ObjectEntry
from datastates.container.table import Row, ShardTable
from datastates.restoring.read_queue import Source
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
        """What it holds beside tensors."""

    @property
    def checked(self) -> bool:
        """Whether its chunks have checksums, so that what is read of it is verified on the way."""

    def record_crc(self, record: int) -> int | None:
        """CRC-32 of a whole record; None if it has none."""

    def read_row(self, row: Row) -> memoryview:
        """Read the bytes from a row's first element to its last.

        They are verified where the chunks have checksums, and where the row fills a record that has one.

        Raises:
            CorruptError: They do not match.
            StorageError: Reading failed.
        """


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

    def holds(self, full: str) -> bool:
        """Whether there is a tensor with that full key."""

    def find(self, full: str) -> Row | None:
        """A row with any part of the tensor of that full key; None if there is none."""

    def whole(self, fulls: Sequence[str]) -> Sequence[tuple[Row, Sequence[tuple[TensorFile, Row]]]]:
        """For each full key, any row of its tensor, and all rows that hold elements of it, each with its file.

        Raises:
            KeyError: There is no tensor with one of the keys.
            DatastatesError: Only a part of a tensor is there.
        """

    def sources(self, wanted: Sequence[tuple[Row, Part]]) -> Sequence[Sequence[tuple[TensorFile, Row]]]:
        """The rows that may share elements with parts of tensors, each with its file.

        Args:
            wanted: For each part, any row of its tensor, and the part.

        Returns:
            For each part, its sources.

        Raises:
            FormatError: The parts of a tensor are of different types or shapes.
        """

    def digest(self, full: str) -> int | None:
        """What all parts of a tensor contribute to its digest; None if that is unknown."""

    def objects(self) -> Sequence[str]:
        """Full keys of what is no tensor."""
