"""What the tests of this folder share. Where Lightning is not installed they are skipped, and say so."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import module_at

from datastates import _native
from datastates._base import faults

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("lightning")
    if found is not None and found.origin is not None:  # without an origin it is this folder, not the package
        return
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason="Lightning is not installed: its tests did NOT run"))


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_at(HERE / "training.py")


@pytest.fixture
def io(training: ModuleType) -> Iterator[Any]:
    made = training.DataStatesCheckpointIO(**training.OPTIONS)
    yield made
    _native.clear_faults()
    faults.clear()
    made.files.settings = made.files.settings.model_copy(update={"on_error": "warn"})
    made.teardown()
