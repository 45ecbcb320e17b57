"""Whether strided arrays have elements in common."""

from __future__ import annotations

import pytest

from datastates.state import strides


@pytest.mark.parametrize(
    ("offset", "size", "common"),
    [
        (4, 3, False),  # the odd elements beside the even ones
        (8, 3, True),
        (0, 0, False),
        (1000, 3, False),
    ],
)
def test_arrays_between_each_other(offset: int, size: int, common: bool) -> None:
    views = [(4096, (8,), (2,)), (4096 + offset, (size,), (2,))]
    assert strides.have_common_elements(views, 4) is common


def test_arrays_that_take_too_long_to_tell_count_as_common() -> None:
    """Whether two arrays share an element is NP-hard to tell in general."""
    steps = (12345, 23456, 34567, 45678, 56789)
    views = [(4096, (9,) * 5, steps), (4103, (9,) * 5, tuple(step + 11 for step in steps))]
    assert strides.have_common_elements(views, 1)
