"""A checkpoint of another format: the logical tensors of its files. All other formats are read and verified here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from datastates._base.cached import cached_property
from datastates.container.logical import contributed
from datastates.container.object_entry import ObjectEntry, by_key
from datastates.container.pickle_reader import Trust
from datastates.container.table import Row
from datastates.errors import DatastatesError, FormatError
from datastates.executor.executor import Executor
from datastates.formats.foreign_file import ForeignFile
from datastates.formats.format import Problem
from datastates.reading.new_arrays import AllTensors
from datastates.reading.proof import crc_of_record
from datastates.reading.tensors import Found, FoundRow, Held, Metadata
from datastates.state.new_memory import Into
from datastates.state.parts import Part, uncovered
from datastates.storage.location import Location


class ComposedTensors:
    """The tensors in all files, as :class:`~datastates.reading.tensors.ComposedTensors`."""

    def __init__(self, files: Sequence[ForeignFile]) -> None:
        """Take the files of a checkpoint."""
        self._files = [file for file in files if file.composed]
        self.arrays: Mapping[str, Sequence[str]] = {
            key: [*one.arrays] for file in self._files for key, one in file.composed.items()
        }

    def kind(self, full: str) -> str:
        """The name of a tensor's class."""
        return next(type(file.composed[full].stand).__name__ for file in self._files if full in file.composed)

    def vet(self, fulls: Collection[str], trust: Trust) -> None:
        """Refuse tensors that could not be built; raises TrustError and FormatError."""
        for file in self._files:
            if wanted := [full for full in fulls if full in file.composed]:
                file.vet_composed(wanted, trust)

    def build(self, arrays: Mapping[str, object], trust: Trust) -> dict[str, Any]:
        """Build the tensors all of whose arrays are given; raises as :meth:`vet`."""
        found: dict[str, Any] = {}
        for file in self._files:
            if any(full in arrays for one in file.composed.values() for full in one.arrays):
                found |= file.build_composed(arrays, trust)
        return found


class Foreign:
    """A checkpoint of another format, opened: its tensors, and their files.

    Attributes:
        format: The name of its format.
        path: Its path.
        files: Its files.
        step: The step of the checkpoint; None if it does not tell.
        lost: Empty: all files are opened at once.
        is_listed: True, for the same reason.
    """

    lost: Mapping[int, Location] = MappingProxyType({})
    is_listed = True

    def __init__(self, format: str, path: Location, files: Sequence[ForeignFile], step: int | None = None) -> None:
        """Make a checkpoint of its opened files."""
        self.format = format
        self.path = path
        self.files = files
        self.step = step

    @property
    def tensors(self) -> Foreign:
        """The checkpoint itself, as the protocol of logical tensors."""
        return self

    @cached_property
    def metadata(self) -> Metadata:
        """The texts in the headers of its files."""
        texts: dict[str, set[str]] = {}
        for name, text in (item for file in self.files for item in file.metadata.items()):
            texts.setdefault(name, set()).add(text)
        differing = tuple(name for name, found in texts.items() if len(found) > 1)
        return Metadata({name: text for name, (text, *more) in texts.items() if not more}, {}, differing)

    # --- its tensors

    @cached_property
    def keys(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """The full keys, in the order of the files, and for each the numbers of the files and rows that hold parts."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, file in enumerate(self.files):
            for row, key in enumerate(file.shards.keys):
                found.setdefault(key, []).append((number, row))
        return found

    def holds(self, full: str) -> bool:
        """Whether there is a tensor with that full key."""
        return full in self.keys

    def find(self, full: str) -> Row | None:
        """A row with any part of the tensor of that full key; None if there is none."""
        return next((row for _, row in self._parts([full])[full]), None)

    def whole(self, fulls: Sequence[str]) -> list[tuple[Row, list[tuple[ForeignFile, Row]]]]:
        """Find the rows of whole tensors; see :meth:`datastates.reading.tensors.Tensors.whole`.

        Raises:
            KeyError: There is no tensor with one of the keys.
            FormatError: The parts of a tensor are of different types or shapes.
            DatastatesError: Only a part of a tensor is there.
        """
        result = []
        for full, parts in self._parts(fulls).items():
            if not parts:
                raise KeyError(full)
            _, first = parts[0]
            if len({(row.dtype, row.global_shape) for _, row in parts}) > 1:
                raise FormatError(f"{self.path}: the parts of {full!r} are of different types or shapes")
            held = [(file, row) for file, row in parts if row.part.numel]
            if uncovered(Part.whole(first.global_shape), [row.part for _, row in held]):
                raise self._partial(full)
            result.append((first, held))
        return result

    def sources(self, wanted: Sequence[tuple[Row, Part]]) -> Sequence[Sequence[FoundRow]]:
        """For each part of a tensor, given with any row of it, the rows that hold elements of the tensor.

        Raises:
            FormatError: The parts of a tensor are of different types or shapes.
        """
        places = [self.keys.get(like.key, ()) for like, _ in wanted]
        return Found([like for like, _ in wanted], self._held(places))

    def _held(self, places: Iterable[Sequence[tuple[int, int]]]) -> list[Held]:
        """For each wanted part, files and rows, in columns for each file."""
        found: dict[int, list[tuple[int, int]]] = {}
        for part, rows in enumerate(places):
            for file, row in rows:
                found.setdefault(file, []).append((part, row))
        return [Held(self.files[file], *np.array(found[file], np.int64).T) for file in sorted(found)]

    def _partial(self, full: str) -> DatastatesError:
        return DatastatesError(f"{full!r} cannot be read from {self.path}: only a part of it is there")

    def _parts(self, fulls: Sequence[str]) -> dict[str, list[tuple[ForeignFile, Row]]]:
        found: dict[str, list[tuple[ForeignFile, Row]]] = {full: [] for full in fulls}
        rows: dict[int, list[int]] = {}
        for number, row in (place for full in found for place in self.keys.get(full, ())):
            rows.setdefault(number, []).append(row)
        for number, wanted in rows.items():
            file = self.files[number]
            for made in file.shards.rows(wanted):
                found[made.key].append((file, made))
        return found

    def digest(self, full: str) -> int | None:
        """The digest of a tensor, from the contributions of all its parts; None if a part has no checksum."""
        return contributed([row for _, row in self._parts([full])[full]])

    def objects(self) -> dict[str, ObjectEntry]:
        """The objects, which are no tensors, by full key."""
        return by_key(entry for file in self.files for entry in file.objects)

    @cached_property
    def composed(self) -> ComposedTensors:
        """Its tensors that consist of others."""
        return ComposedTensors(self.files)

    # --- all of it

    def load(self, executor: Callable[[int], Executor], *, trust: Trust, into: Into) -> Any:
        """Read all tensors into new memory, into a dict by full key, and verify all that have checksums.

        Raises:
            CorruptError: A tensor does not match its checksum; the message names it.
            DatastatesError: Only a part of a tensor is there.
            TrustError: A tensor that consists of others needs a class that is not trusted.
            ImportError: An element type needs torch or ml_dtypes and neither is installed.
            StorageError: Reading failed.
        """
        self.composed.vet(self.composed.arrays, trust)
        if self.composed.arrays and not into.with_torch:
            key = next(iter(self.composed.arrays))
            raise ImportError(f"{key!r} is built by torch only, which is not installed, or not wanted: framework='np'")
        found: dict[str, Any] = {}
        if held := self._held(self.keys.values()):
            with contextlib.closing(AllTensors(held, into)) as new:
                new.begin(executor, self._partial)
                new.finish()
                found = {key: new.array(number) for number, key in enumerate(self.keys)}
        inside = {key: found.pop(key) for keys in self.composed.arrays.values() for key in keys}
        return found | self.composed.build(inside, trust)

    @property
    def nbytes(self) -> int:
        """Length of all records together, in bytes."""
        return sum(record.nbytes for file in self.files for record in file.records)

    @property
    def proof(self) -> str:
        """The end of a sentence for the user: what a verification without findings has proven."""
        known = [record.crc is not None for file in self.files for record in file.records if record.nbytes]
        if not any(known):
            return "headers and lengths are as they must be; there are no checksums of the data"
        if all(known):
            return "every tensor matches its checksum"
        return f"{sum(known)} of {len(known)} records have a checksum and match it"

    def verify(self, progress: Callable[[int], object]) -> Iterator[Problem]:
        """Read every record, and compare it with its checksum if it has one. Opening has checked the headers."""
        for file in self.files:
            for number, record in enumerate(file.records):
                crc = crc_of_record(file, number, progress)
                if record.crc is not None and crc != record.crc:
                    yield Problem(file.path, file.name_record(number), "does not match its checksum")


def refuse_repeated(path: Location, files: Sequence[ForeignFile], known: Collection[str] = ()) -> None:
    """Raise FormatError if a key is in several files of whole tensors, or among the ``known`` keys."""
    places: dict[str, Location] = dict.fromkeys(known, path)
    for file in files:
        for key in file.shards.keys:
            if (other := places.setdefault(key, file.path)) != file.path:
                raise FormatError(f"{path}: {key!r} is in {other.name} and in {file.path.name}")
