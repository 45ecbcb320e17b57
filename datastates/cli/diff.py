"""The command ``datastates diff``: says what differs between two checkpoints and, if asked, how far."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from datastates.cli.arguments import add_step, as_location
from datastates.cli.output import IN_SHELL, as_key, print_json, progress_bar, say
from datastates.config import IoSettings
from datastates.container.digest_runs import Places, places_of
from datastates.container.digests import contribution_of, row_major, strided
from datastates.container.logical import Logical, combine
from datastates.container.object_entry import ObjectEntry
from datastates.container.pickle_policy import TorchName
from datastates.errors import FormatError
from datastates.executor.make import make_small_executor
from datastates.formats import recognise
from datastates.formats.format import Opened
from datastates.reading.pieces import are_numbers, pieces
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


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the values of two arrays of one type and shape, A and B, lie from each other.

    Attributes:
        elements: Number of elements of each array.
        differing: Number of elements whose values differ. A NaN equals a NaN, and -0 equals 0.
        not_finite: Number of the differing elements whose difference is no finite number: one of them is, say, NaN.
        most: Largest absolute difference; None if no difference is a finite number.
        at: Index of an element with that difference.
        relative: Norm of the differences divided by the norm of A, both without the elements of ``not_finite``. None if
            A has the norm 0, or if one of the norms is too large for float64.
    """

    elements: int
    differing: int
    not_finite: int
    most: float | None
    at: tuple[int, ...] | None
    relative: float | None

    def __str__(self) -> str:
        """The distance as the end of a sentence about a tensor."""
        if not self.differing:
            return "differs in no value: in the signs of zeros or in the bits of NaN"
        text = f"differs in {self.differing} of {self.elements} elements"
        if self.most is not None:
            text += f", at most by {self.most:.4g} at {list(self.at or ())}"
        if self.relative is not None:
            text += f", by {self.relative:.3g} of its norm"
        return text + (f"; {self.not_finite} of them are not finite" if self.not_finite else "")


def distance(pieces: Iterable[tuple[tuple[int, ...], Any, Any]]) -> Distance:
    """Compare two arrays piece by piece.

    Args:
        pieces: For each piece, the index of its first element, and the piece in A and in B: NumPy arrays of one type.
    """
    elements = differing = not_finite = 0
    most, at, squares, norm = -1.0, None, 0.0, 0.0
    for begin, a, b in pieces:
        elements += a.size
        differs = (a != b) & ~((a != a) & (b != b))
        differing += int(differs.sum())
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        with np.errstate(over="ignore", invalid="ignore"):
            a = a.astype(wide)
            difference = np.where(differs, np.abs(a - b.astype(wide)), 0.0)
            finite = np.isfinite(difference)
            not_finite += int((~finite).sum())
            difference[~finite] = -1.0
            if difference.max() > max(most, 0.0):
                found = np.unravel_index(difference.argmax(), difference.shape)
                at = tuple(int(i + first) for i, first in zip(found, begin, strict=True))
                most = float(difference.max())
            squares += float(np.square(difference[finite]).sum())
            norm += float(np.square(np.abs(a[finite & np.isfinite(a)])).sum())
    known = 0 < norm < np.inf and squares < np.inf
    relative = float(np.sqrt(squares / norm)) if known and at is not None else None
    return Distance(elements, differing, not_finite, None if at is None else most, at, relative)


WHAT = "compare two checkpoints by their digests; exit 1 when they differ, 2 when they cannot be compared"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    for name in ("A", "B"):
        command.add_argument(name, type=as_location, help="as for inspect")
    add_step(command)
    what = "read the tensors of other contents, and say how many elements differ, and how far"
    command.add_argument("--values", action="store_true", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    with (
        recognise.opened(arguments.A, arguments.step, IN_SHELL) as a,
        recognise.opened(arguments.B, arguments.step, IN_SHELL) as b,
    ):
        found = compare(a.files, b.files)
        values = _distances(a, b, found, quiet=arguments.json) if arguments.values else {}
    if arguments.json:
        print_json(
            {
                "equal": found.is_equal,
                "only_a": found.only_a,
                "only_b": found.only_b,
                "descriptions": [{"key": key, "a": a, "b": b} for key, a, b in found.descriptions],
                "contents": found.contents,
                **({"values": {key: asdict(one) for key, one in values.items()}} if arguments.values else {}),
                "alike": found.equal,
                "bytes_read": found.read,
            }
        )
    else:
        _print_differences(found, values, str(arguments.A), str(arguments.B))
    return 0 if found.is_equal else 1


def _distances(a: Opened, b: Opened, found: Differences, *, quiet: bool) -> dict[str, Distance]:
    """How far the tensors of other contents differ, by full key, without those of types that are no numbers."""
    rows = {key: row for key in found.contents if a.tensors.holds(key) and (row := a.tensors.find(key)) is not None}
    numbers = {key: row for key, row in rows.items() if are_numbers(row.dtype)}
    total = sum(2 * math.prod(row.global_shape) * row.dtype.itemsize for row in numbers.values())
    with (
        contextlib.closing(make_small_executor(IoSettings.of({}), total)) as executor,
        progress_bar("diff", quiet=quiet) as advance,
    ):

        def both(key: str) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
            of_a, of_b = (pieces(one.tensors, key, executor) for one in (a, b))
            for (begin, piece), (_, other) in zip(of_a, of_b, strict=True):
                yield begin, piece, other
                advance(2 * piece.size * numbers[key].dtype.itemsize, total)

        return {key: distance(both(key)) for key in numbers}


def _print_differences(found: Differences, values: Mapping[str, Distance], a: str, b: str) -> None:
    for where, keys in ((a, found.only_a), (b, found.only_b)):
        for key in keys:
            say(f"{as_key(key)} is only in {where}")
    for key, one, other in found.descriptions:
        say(f"{as_key(key)} is {one} in {a}, {other} in {b}")
    for key in found.contents:
        say(f"{as_key(key)} {values.get(key, 'differs')}")
    only = len(found.only_a) + len(found.only_b)
    say(
        f"{found.equal} alike, {len(found.contents)} of other contents, {len(found.descriptions)} of another type or "
        f"shape, {only} in one of them only"
    )
