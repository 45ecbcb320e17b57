"""Printing for the commands: JSON, tables, sizes, shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = 1
"""The version of the JSON output. It increases when a field changes its meaning or is removed."""


def print_json(value: dict[str, Any]) -> None:
    """Print a value as JSON, with the schema number."""
    json.dump({"schema": SCHEMA, **value}, sys.stdout, indent=2)
    print()


_WIDEST = 80


def print_table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> None:
    """Print rows of equal length in aligned columns; the columns in ``numbers`` are aligned to the right."""
    # a cell that is wider than this sticks out, and does not widen its column
    widths = [max((n for row in rows if (n := len(row[i])) <= _WIDEST), default=0) for i in range(len(rows[0]))]
    for row in rows:
        cells = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())


def as_size(nbytes: int) -> str:
    """A number of bytes as text, in the largest unit that gives at least 1."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"


def printable(text: str) -> str:
    """A text with control characters escaped, because they could control a terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def as_part(part: Mapping[str, Any], shape: Sequence[int]) -> str:
    """Describe a part of a tensor of that shape."""
    if part["shape"] == shape:
        return "all"
    if part["flat"] is not None:
        return f"elements {part['flat'][0]}:{part['flat'][1]}"
    sides = zip(part["box"], part["shape"], strict=True)
    return f"[{', '.join(f'{begin}:{begin + length}' for begin, length in sides)}]"


def as_shape(shape: Sequence[int]) -> str:
    """A shape as ``2x3``."""
    return "x".join(map(str, shape)) if shape else "scalar"
