"""The native core takes the columns of a plan by their names, and refuses a name too many or too few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from datastates import _native

WORDS = dict.fromkeys(("offset", "length", "run_length", "after", "step"), np.zeros(0, np.uint64))
RUNS: dict[str, Any] = {"digests": 0, "digest": np.zeros(0, np.uint32), **WORDS}


@pytest.mark.parametrize(
    "changed",
    [lambda: RUNS | {"offsets": WORDS["offset"]}, lambda: {k: v for k, v in RUNS.items() if k != "offset"}],
    ids=["too many", "too few"],
)
def test_names_are_checked(changed: Callable[[], dict[str, Any]]) -> None:
    _native.Digester(**RUNS)
    with pytest.raises(TypeError, match=r"(?s)incompatible constructor arguments.*run_length"):
        _native.Digester(**changed())
