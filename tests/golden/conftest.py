"""The golden files, and what they were made from."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # what these tests share


@pytest.fixture(scope="session")
def made() -> SimpleNamespace:
    """What generate.py defines: the values, and build()."""
    return SimpleNamespace(**runpy.run_path(str(HERE / "generate.py")))


@pytest.fixture(scope="session")
def golden() -> dict[str, Path]:
    return {name: HERE / name for name in ("container.pt", "manifest.json", "manifest-2.json")}


@pytest.fixture(scope="session")
def nested() -> Path:
    """A nested container: each of its records is an archive by itself."""
    return HERE / "nested.pt"


@pytest.fixture(scope="session")
def hashed() -> Path:
    """The first container, with the hashes of its chunks and arrays."""
    return HERE / "hashed.pt"


@pytest.fixture(scope="session")
def several() -> Path:
    """A checkpoint of two ranks."""
    return HERE / "several"


@pytest.fixture(scope="session")
def kept() -> Path:
    """A checkpoint of one rank with a kept container."""
    return HERE / "kept"
