"""Sums up the sizes of arrays by the modules that their keys name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MOST = 16
"""Most modules of a summary."""
_SEPARATOR = re.compile(r"[./]")
_NUMBER = re.compile(r"(?<![^./_])\d+(?![^./])")
_Arrays = Sequence[tuple[Sequence[str], int]]
"""For each array, the modules around it, the outermost first, and its bytes."""


class Module(NamedTuple):
    """The arrays of one module.

    Attributes:
        name: The beginning of their keys, with ``*`` for a number: ``model/layers.*.mlp``. Empty for all arrays.
        arrays: Number of the arrays.
        nbytes: Bytes of the arrays.
    """

    name: str
    arrays: int
    nbytes: int


def modules(nbytes: Mapping[str, int]) -> list[Module]:
    """Sum up arrays by module, in at most :data:`MOST` modules; the largest comes first.

    The names in a key are separated by slashes and dots. The last one is the array's, the others are modules. Numbered
    modules count as one. The largest module is divided into those inside it, again and again, until they would be too
    many. What a divided module holds directly keeps its name.

    Args:
        nbytes: The bytes of each array, by full key.
    """
    shown: dict[str, _Arrays] = {"": [(_around(key), n) for key, n in nbytes.items()]}
    while divisible := [name for name, arrays in shown.items() if any(around[-1] != name for around, _ in arrays)]:
        largest = max(divisible, key=lambda name: _sum(shown[name]))
        divided = {name: arrays for name, arrays in shown.items() if name != largest} | _inside(largest, shown[largest])
        if len(divided) > MOST:
            break
        shown = divided
    found = [Module(name, len(arrays), _sum(arrays)) for name, arrays in shown.items() if arrays]
    return sorted(found, key=lambda module: -module.nbytes)


def _around(key: str) -> list[str]:
    """The modules around an array, the outermost first: the beginnings of its key, from the empty one on."""
    name = _NUMBER.sub("*", key)
    return ["", *(name[: match.start()] for match in _SEPARATOR.finditer(name))]


def _inside(module: str, arrays: _Arrays) -> dict[str, _Arrays]:
    """The arrays of a module by the next module inside it."""
    found: dict[str, list[tuple[Sequence[str], int]]] = {}
    for around, n in arrays:
        name = around[min(around.index(module) + 1, len(around) - 1)]
        found.setdefault(name, []).append((around, n))
    return dict(found)


def _sum(arrays: _Arrays) -> int:
    return sum(n for _, n in arrays)
