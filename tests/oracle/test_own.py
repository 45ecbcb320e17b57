"""Modules that override or hook how their state is saved and loaded are served as stock serves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from dividing import divided
from oracle import check
from own_modules import cases
from subject import Case

FEW = ("AsDict inside", "AsBytes", "SavesScale inside", "RenewsWhatItDerives", "Resizes", "Wraps", "Assigns", "Refuses")
FEW += ("before load _swap inside", "after load _halve", "of state _cast", "renamed by a hook")
FEW += ("an extra state that is missing",)


@pytest.mark.parametrize("cases", divided(cases(), FEW))
def test_own_modules(cases: Sequence[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)
