"""Results as text: tables, sizes, shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datastates.cli.output import say

IN_SHELL = "take it with --step {step}"
"""Advice in the shell on how to take another step; :func:`datastates.formats.recognise.opened` gives it."""
_WIDEST = 80


def print_table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> None:
    """Print rows of equal length in aligned columns; the columns in ``numbers`` are aligned to the right."""
    # a cell that is wider than this sticks out, and does not widen its column
    widths = [max((n for row in rows if (n := len(row[i])) <= _WIDEST), default=0) for i in range(len(rows[0]))]
    for row in rows:
        cells = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        say("  ".join(cells).rstrip())


def as_size(nbytes: int) -> str:
    """A number of bytes as text, in the largest unit that gives at least 1."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"


def as_part(part: Mapping[str, Any], shape: Sequence[int]) -> str:
    """Describe a part of a tensor of ``shape`` as text."""
    if part["shape"] == shape:
        return "all"
    if part["flat"] is not None:
        return f"elements {part['flat'][0]}:{part['flat'][1]}"
    sides = zip(part["box"], part["shape"], strict=True)
    return f"[{', '.join(f'{begin}:{begin + length}' for begin, length in sides)}]"


def as_shape(shape: Sequence[int]) -> str:
    """A shape as text, such as ``2x3``."""
    return "x".join(map(str, shape)) if shape else "scalar"
