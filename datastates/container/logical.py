"""Puts logical tensors together from the parts in several containers."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from datastates.container.digests import digest_of
from datastates.container.table import Row, ShardTable
from datastates.errors import FormatError
from datastates.state.dtypes import BY_NAME


@dataclass(frozen=True, slots=True, eq=False)
class Logical:
    """One logical tensor, put together from the rows of all containers.

    Attributes:
        dtype: Its element type.
        shape: Its shape.
        parts: For each part, the number of its table, the number of its row, and the row.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: list[tuple[int, int, Row]]

    @property
    def is_complete(self) -> bool:
        """Whether the parts have as many elements as the tensor."""
        return _numel(row for _, _, row in self.parts) == math.prod(self.shape)

    def digest(self, contributions: Sequence[int | None]) -> int | None:
        """The tensor's digest, from the parts' contributions; None where a part or a contribution is missing."""
        found = _folded(contributions) if self.is_complete else None
        return None if found is None else digest_of(found, math.prod(self.shape) * BY_NAME[self.dtype].itemsize)

    @property
    def stored_digest(self) -> int | None:
        """The tensor's digest as saved; None unless all parts are stored and were digested at the save."""
        return self.digest([row.digest for _, _, row in self.parts])


def contributed(rows: Sequence[Row]) -> int | None:
    """The combined contribution of one tensor's rows to its digest; None where a part or a contribution is missing."""
    is_complete = rows and _numel(rows) == math.prod(rows[0].global_shape)
    return _folded([row.digest for row in rows]) if is_complete else None


def _numel(rows: Iterable[Row]) -> int:
    return sum(math.prod(row.shape) for row in rows)


def _folded(contributions: Sequence[int | None]) -> int | None:
    """The combined contribution of all parts; None if one is unknown."""
    known = [one for one in contributions if one is not None]
    return functools.reduce(operator.xor, known, 0) if len(known) == len(contributions) else None


def combine(tables: Sequence[ShardTable]) -> dict[str, Logical]:
    """Join the rows of several containers of one checkpoint into logical tensors, by full key.

    Raises:
        FormatError: Containers disagree about the type or the shape of a tensor.
    """
    found: dict[str, Logical] = {}
    for t, table in enumerate(tables):
        for i, row in enumerate(table.rows(range(len(table)))):
            known = found.setdefault(row.key, Logical(row.dtype.name, row.global_shape, []))
            if (known.dtype, known.shape) != (row.dtype.name, row.global_shape):
                raise FormatError(f"the containers disagree about the type or the shape of {row.key!r}")
            known.parts.append((t, i, row))
    return found
