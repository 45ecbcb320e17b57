"""Modules that torch wraps, parametrizes, averages or makes lazily are saved and restored as stock does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from dividing import divided
from oracle import check
from subject import Case
from wrapped_modules import cases

FEW = (
    "weight_norm",
    "old spectral_norm",
    "pruned",
    "compiled",
    "LazyLinear-into-uncalled",
    "tied",
    "average",
    "scaler",
)


@pytest.mark.parametrize("cases", divided(cases(), FEW))
def test_wrapped(cases: Sequence[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)
