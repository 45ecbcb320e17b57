"""Divides cases among tests: a few that differ most for every run, the others, marked ``long``, in heaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from subject import Case

HEAP = 25


def divided(
    cases: Iterable[Case], few: Sequence[str], rest_mark: pytest.MarkDecorator = pytest.mark.long
) -> list[object]:
    """Parameters for a test that is given several cases. ``rest_mark``: of those that are not among the few."""
    every = {case.name: case for case in cases}
    first, rest = [every[name] for name in few if name in every], [c for name, c in every.items() if name not in few]
    heaps = [rest[i : i + HEAP] for i in range(0, len(rest), HEAP)]
    return [
        pytest.param(first, id="few"),
        *(pytest.param(heap, id=f"{heap[0]} to {heap[-1]}", marks=rest_mark) for heap in heaps),
    ]
