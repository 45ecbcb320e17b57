"""Classes of libraries are saved and restored as stock does it."""

from __future__ import annotations

from pathlib import Path

import pytest
from library_cases import LIBRARIES
from oracle import check
from safe_globals import only_torchs_own


@pytest.mark.long
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    cases = list(LIBRARIES[name]())
    with only_torchs_own():
        check(cases, tmp_path)
