"""Modules that override or hook how their state is saved and loaded are served as stock serves them."""

from __future__ import annotations

from pathlib import Path

from oracle import check
from own_modules import cases


def test_own_modules(tmp_path: Path) -> None:
    check(list(cases()), tmp_path)
