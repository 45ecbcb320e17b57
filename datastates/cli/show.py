"""What the commands print: JSON, tables, sizes, shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = 1
"""Of the JSON: goes up where a field changes its meaning or goes away."""


def print_json(value: dict[str, Any]) -> None:
    """Print a value, with the number of its schema."""
    json.dump({"schema": SCHEMA, **value}, sys.stdout, indent=2)
    print()


_WIDEST = 80


def print_table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> None:
    """Print rows of equal length in aligned columns; those in ``numbers`` to the right."""
    # a longer cell stands out, and does not push all other lines apart
    widths = [max((n for row in rows if (n := len(row[i])) <= _WIDEST), default=0) for i in range(len(rows[0]))]
    for row in rows:
        cells = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())


def as_size(nbytes: int) -> str:
    """A number of bytes in the unit that fits."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"


def printable(text: str) -> str:
    """A text without control characters, which could do something to a terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def as_part(part: Mapping[str, Any], shape: Sequence[int]) -> str:
    """Which part of a tensor of that shape."""
    if part["shape"] == shape:
        return "all"
    if part["flat"] is not None:
        return f"elements {part['flat'][0]}:{part['flat'][1]}"
    sides = zip(part["box"], part["shape"], strict=True)
    return f"[{', '.join(f'{begin}:{begin + length}' for begin, length in sides)}]"


def as_shape(shape: Sequence[int]) -> str:
    """A shape as ``2x3``."""
    return "x".join(map(str, shape)) if shape else "scalar"
