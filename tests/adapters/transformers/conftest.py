"""Skips the tests of this folder, and says so, where transformers is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("transformers")
    if found is not None and found.origin is not None:  # without an origin it is this folder, not the package
        return
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason="transformers is not installed: its tests did NOT run"))
