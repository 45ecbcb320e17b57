"""The sources of reads: a checkpoint of any format as its logical tensors, and the files with their bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from datastates._base.cached import cached_property
from datastates._base.columns import I64, U64
from datastates.container.object_entry import ObjectEntry
from datastates.container.pickle_reader import Trust
from datastates.container.table import Row, ShardTable
from datastates.errors import CorruptError, FormatError
from datastates.reading.read_queue import Source
from datastates.state.parts import Part
from datastates.storage.location import Location


class TensorFile(Source, Protocol):
    """A file with tensors: a :class:`~datastates.container.file.Container`, or a file of another format."""

    @property
    def shards(self) -> ShardTable:
        """The tensors, or parts of tensors, that lie in the file's records."""

    @property
    def record_nbytes(self) -> U64:
        """Length of each record's data in bytes."""

    @property
    def objects(self) -> Sequence[ObjectEntry]:
        """The entries of the file's objects, which are no tensors."""

    @property
    def checked(self) -> bool:
        """Whether the file's chunks have checksums, so bytes are verified while they are read."""

    def record_crc(self, record: int) -> int | None:
        """CRC-32 of a whole record; None if the file has none for it."""

    def corrupt(self, key: str) -> CorruptError:
        """Make the error for damaged data of the tensor ``key``."""

    def read_row(self, row: Row) -> memoryview:
        """Read the bytes from a row's first element to its last.

        The bytes are verified if the chunks have checksums, or if the row fills a record that has one.

        Raises:
            CorruptError: The bytes do not match their checksum.
            StorageError: Reading failed.
        """


FoundRow = tuple[TensorFile, Row]
"""The file that a row is in, and the row."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Rows of one file that may share elements with wanted parts, in columns with an entry for each pair.

    Attributes:
        file: The file.
        part: Number of the wanted part.
        row: Number of the row in the file's table.
    """

    file: TensorFile
    part: I64
    row: I64


class Found(Sequence[Sequence[FoundRow]]):
    """For each wanted part, the rows that may share elements with it, each with its file.

    The rows are made when the first item is read, which raises FormatError if a file has a tensor with another element
    type or shape than the tensor's other rows. Rows without elements are left out.

    Attributes:
        held: The same pairs of part and row as numbers, an entry for each file.
    """

    def __init__(self, likes: Sequence[Row], held: Sequence[Held]) -> None:
        """Keep what was found.

        Args:
            likes: For each wanted part, any row of its tensor.
            held: The found rows, an entry for each file.
        """
        self._likes = likes
        self.held = held

    def __len__(self) -> int:
        """The number of wanted parts."""
        return len(self._likes)

    @overload
    def __getitem__(self, i: int) -> Sequence[FoundRow]: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Sequence[FoundRow]]: ...
    def __getitem__(self, i: int | slice) -> Sequence[FoundRow] | Sequence[Sequence[FoundRow]]:
        """The rows that were found for part number ``i``."""
        return self._made[i]

    @cached_property
    def _made(self) -> list[list[FoundRow]]:
        made: list[list[FoundRow]] = [[] for _ in self._likes]
        for held in self.held:
            for part, row in zip(held.part.tolist(), held.file.shards.rows(held.row.tolist()), strict=True):
                like = self._likes[part]
                if (row.dtype, row.global_shape) != (like.dtype, like.global_shape):
                    raise FormatError(f"{held.file.path}: {row.key!r} is of another type or shape than in other files")
                if 0 not in row.shape:
                    made[part].append((held.file, row))
        return made


@dataclass(frozen=True, slots=True)
class Metadata:
    """What files of safetensors hold beside their tensors. Files of other kinds hold nothing of it.

    Attributes:
        texts: The texts in the headers, by name.
        index: The metadata in the index of several files, without the sum of their sizes.
        differing: Names of texts that differ from header to header. They are not in ``texts``.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    index: Mapping[str, Any] = field(default_factory=dict)
    differing: tuple[str, ...] = ()


class ComposedTensors(Protocol):
    """Tensors that are built from other tensors and a description, such as quantized weights, by full key.

    Attributes:
        arrays: For each tensor the full keys of the tensors in it.
    """

    arrays: Mapping[str, Sequence[str]]

    def kind(self, full: str) -> str:
        """The name of a tensor's class."""

    def vet(self, fulls: Collection[str], trust: Trust) -> None:
        """Refuse tensors that could not be built. No code of their classes runs.

        Raises:
            TrustError: They need classes that are not trusted; the message names all of them.
            FormatError: A trusted class cannot be imported.
        """

    def build(self, arrays: Mapping[str, object], trust: Trust) -> Mapping[str, Any]:
        """Build the tensors all of whose arrays are given by full key; raises as :meth:`vet`."""


class Tensors(Protocol):
    """The logical tensors of one checkpoint, by full key, and where their bytes lie."""

    @property
    def path(self) -> Location:
        """The path of the checkpoint."""

    @property
    def step(self) -> int | None:
        """The training step that the checkpoint was saved at; None if it does not say."""

    @property
    def metadata(self) -> Metadata:
        """What its files hold beside tensors."""

    @property
    def lost(self) -> Mapping[int, Location]:
        """The paths of files that were needed and are missing, by the number of the file."""

    @property
    def keys(self) -> Mapping[str, object]:
        """The full keys of all tensors, in the order of the files."""

    @property
    def is_listed(self) -> bool:
        """Whether :attr:`keys` can be read without opening more files."""

    def holds(self, full: str) -> bool:
        """Whether there is a tensor with the full key."""

    def find(self, full: str) -> Row | None:
        """A row with any part of the tensor with the full key; None if there is none."""

    def whole(self, fulls: Sequence[str]) -> Sequence[tuple[Row, Sequence[FoundRow]]]:
        """Find the rows of whole tensors.

        Returns:
            Two entries for each key. The first is a row that tells the tensor's type and shape. The second has the rows
            with its elements, each with the row's file; it is empty for a tensor without elements.

        Raises:
            KeyError: There is no tensor with one of the keys.
            DatastatesError: A tensor is there only in part.
            FormatError: A file is damaged, or the parts of a tensor are of different types or shapes.
            StorageError: A file cannot be read.
        """

    def sources(self, wanted: Sequence[tuple[Row, Part]]) -> Sequence[Sequence[FoundRow]]:
        """The rows that may share elements with parts of tensors, each with its file.

        Args:
            wanted: For each part, any row of its tensor, and the part.

        Returns:
            For each part, the rows.

        Raises:
            FormatError: The parts of a tensor are of different types or shapes.
        """

    def digest(self, full: str) -> int | None:
        """The sum of all parts' contributions to the digest of a tensor; None if a contribution is unknown."""

    def objects(self) -> Mapping[str, ObjectEntry]:
        """The objects, which are no tensors, by full key."""

    @property
    def composed(self) -> ComposedTensors | None:
        """The tensors that consist of others, and are not listed as tensors; None where objects hold them."""
