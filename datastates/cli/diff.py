"""The command ``datastates diff``: says what differs between two checkpoints and, if asked, how far."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from datastates.cli.arguments import add_step, as_location
from datastates.cli.compare import Differences, compare
from datastates.cli.output import IN_SHELL, as_key, print_json, progress_bar, say
from datastates.config import IoSettings
from datastates.executor.make import make_small_executor
from datastates.formats import recognise
from datastates.formats.format import Opened
from datastates.reading.pieces import are_numbers, pieces


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
