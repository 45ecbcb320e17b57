"""DTensors on several ranks: together the ranks describe each logical tensor once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sharded_state.py")


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "cases"),
    [
        (2, ["fsdp", "tensor_parallel", "data_parallel", "as_saved", "refused"]),
        pytest.param(3, ["fsdp", "any_placement", "outside"], marks=pytest.mark.long),
        pytest.param(4, ["hybrid", "two_dimensional", "any_placement", "writers"], marks=pytest.mark.by_hand),
    ],
)
def test_the_ranks_parts_make_up_the_state(ranks: Callable[..., object], n: int, cases: list[str]) -> None:
    ranks(n, SCRIPT, *cases, timeout=200)
