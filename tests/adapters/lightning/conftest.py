"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import module_at

from datastates import _native
from datastates._base import faults

HERE = Path(__file__).parent


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
