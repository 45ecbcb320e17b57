"""Compares two checkpoints: tensors by digest, which reads no data, and objects without running code from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastates.container.digest_runs import Places, places_of
from datastates.container.digests import contribution_of, row_major, strided
from datastates.container.logical import Logical, combine
from datastates.container.object_entry import ObjectEntry
from datastates.container.pickle_policy import TorchName
from datastates.errors import FormatError
from datastates.reading.tensors import TensorFile

Objects = dict[str, dict[int, ObjectEntry]]
"""The stored objects by full key, then by rank."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between two checkpoints, A and B. Keys are in the order of the checkpoint that has them, A first.

    Attributes:
        only_a, only_b: Keys that only A has, and that only B has.
        descriptions: For each tensor whose type or shape differs: its key, and its type and shape in A and in B.
        contents: Keys of tensors and objects whose values differ.
        equal: Number of tensors and objects that are equal.
        read: Bytes of tensors that were read because a digest was missing.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    descriptions: tuple[tuple[str, str, str], ...]
    contents: tuple[str, ...]
    equal: int
    read: int

    @property
    def is_equal(self) -> bool:
        """Whether the checkpoints are equal."""
        return not (self.only_a or self.only_b or self.descriptions or self.contents)


def compare(a: Sequence[TensorFile], b: Sequence[TensorFile]) -> Differences:
    """Compare two checkpoints, each given by all its files.

    Two tensors are equal if their types, shapes and digests are. The parts that they were cut into and the library that
    they came from do not matter. Only tensors without a digest are read. Objects are compared without their arrays,
    which are compared as tensors. An object that only the code of its class could build is compared as stored.

    Raises:
        FormatError: The files of one checkpoint contradict each other, or elements of a tensor are missing.
        CorruptError: Data that had to be read does not match its checksum.
    """
    tensors = _Digested(a), _Digested(b)
    only_a, only_b, common = _split(tensors[0].found, tensors[1].found)
    descriptions, contents = [], []
    for key in common:
        what_a, what_b = (_describe(t.found[key]) for t in tensors)
        if what_a != what_b:
            descriptions.append((key, what_a, what_b))
        elif tensors[0].digest(key) != tensors[1].digest(key):
            contents.append(key)
    objects = _objects(a), _objects(b)
    lost, new, shared = _split(objects[0], objects[1])
    contents += [key for key in shared if not _same_object(objects[0][key], objects[1][key])]
    return Differences(
        only_a=(*only_a, *lost),
        only_b=(*only_b, *new),
        descriptions=tuple(descriptions),
        contents=tuple(contents),
        equal=len(common) + len(shared) - len(descriptions) - len(contents),
        read=sum(t.read for t in tensors),
    )


def _split(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[list[str], list[str], list[str]]:
    return [k for k in a if k not in b], [k for k in b if k not in a], [k for k in a if k in b]


def _describe(tensor: Logical) -> str:
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


class _Digested:
    """The logical tensors of one checkpoint, and their digests, computed from the data if they are not stored."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self._files = files
        self._places: dict[int, Places] = {}
        self.found = combine([file.shards for file in files])
        self.read = 0

    def digest(self, key: str) -> int:
        tensor = self.found[key]
        if not tensor.is_complete:
            raise FormatError(f"{self._files[0].path.parent} does not hold each element of {key!r} once")
        found = tensor.digest(
            [self._contribution(c, i) if row.digest is None else row.digest for c, i, row in tensor.parts]
        )
        assert found is not None
        return found

    def _contribution(self, c: int, i: int) -> int:
        source = self._files[c]
        if c not in self._places:
            self._places[c] = places_of(source.shards)
        row = source.shards.row(i)
        if 0 in row.shape:
            return 0
        data = source.read_row(row)
        self.read += len(data)
        elements = strided(data, 0, row.shape, row.stride, row.dtype.itemsize)
        return contribution_of(self._places[c], i, row_major(elements))


# --- objects


def _objects(files: Sequence[TensorFile]) -> Objects:
    found: Objects = {}
    for stored in (o for file in files for o in file.objects):
        found.setdefault(stored.key, {})[stored.rank] = stored
    return found


def _same_object(a: dict[int, ObjectEntry], b: dict[int, ObjectEntry]) -> bool:
    """Whether each rank would restore the same value from A and B: its own, or the lowest rank's that has one."""
    pairs = {(a.get(rank, a[min(a)]), b.get(rank, b[min(b)])) for rank in {*a, *b}}
    return all(_same_stored(*pair) for pair in pairs)


def _same_stored(a: ObjectEntry, b: ObjectEntry) -> bool:
    if a.stored == b.stored:
        return True
    array = object()  # stands for every array in an object
    surveys = [one.survey(lambda _: array) for one in (a, b)]
    return all(complete for _, complete in surveys) and _same_value(surveys[0][0], surveys[1][0])


def _same_value(a: Any, b: Any) -> bool:
    """Whether two surveyed values are equal: the same types, keys and order. They may contain themselves."""
    rest = [(a, b)]
    seen: dict[tuple[int, int], tuple[Any, Any]] = {}  # keeps the values, so that their ids stay unique
    while rest:
        x, y = rest.pop()
        if (id(x), id(y)) in seen:
            continue
        seen[id(x), id(y)] = x, y
        if type(x) is not type(y):
            return False
        if isinstance(x, dict):
            if list(x) != list(y):
                return False
            rest += zip(x.values(), y.values(), strict=True)
        elif isinstance(x, (list, tuple)):
            if len(x) != len(y):
                return False
            rest += zip(x, y, strict=True)
        elif isinstance(x, np.ndarray):
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                return False
            if x.dtype.hasobject:
                rest.append((x.tolist(), y.tolist()))
            elif x.tobytes() != y.tobytes():
                return False
        elif isinstance(x, TorchName):
            if x.name != y.name:
                return False
        elif not (x == y or (x != x and y != y)):  # NaN
            return False
    return True
