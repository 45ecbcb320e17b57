"""Classes of libraries are saved and restored as stock does it."""

from __future__ import annotations

from pathlib import Path

import pytest
from library_cases import LIBRARIES
from oracle import check


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.by_hand] if n == "peft" else []) for n in LIBRARIES]
)
def test_libraries(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    cases = list(LIBRARIES[name]())
    check(cases, tmp_path)
