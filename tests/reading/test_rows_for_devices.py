"""Which rows are copied straight to a device, and which go through host memory."""

from __future__ import annotations

import numpy as np
import pytest

from datastates.reading import reads
from datastates.state.runs import Runs


def rows(*each: tuple[int, int, int]) -> Runs:
    """Runs of a length, a count and a distance between stretches; the destination is dense."""
    length, count, step = (np.array(column, np.int64) for column in zip(*each, strict=True))
    zero = np.zeros_like(length)
    return Runs(zero, zero, length, count, np.where(count > 1, step, length), length)


@pytest.mark.parametrize(
    ("runs", "straight"),
    [
        (rows((100, 1, 0)), True),
        (rows((1 << 20, 3, 1 << 30)), True),  # each row is a copy worth making
        (rows((256, 4000, 512)), True),
        (rows((16, 1, 0), (1024, 4000, 4096), (8, 1, 0)), True),  # the ends of a flat range cut rows
        (rows((128, 4000, 512)), False),
        (rows((1024, 4000, 1 << 20)), False),  # too far apart for one copy
        (rows(*[(1024, 1, 0)] * 4000), False),
    ],
)
def test_rows_are_copied_straight_where_few_copies_do(runs: Runs, straight: bool) -> None:
    assert reads._suit_device(runs) is straight
