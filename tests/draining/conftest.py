"""A first tier on a disk, and a further one in a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from far_store import FarStore

from datastates.draining import rounds
from datastates.storage import register, stores


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FarStore:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    monkeypatch.setattr(rounds, "_LONGEST", 0.01)
    monkeypatch.setattr(rounds, "_SHORTEST", 0.01)
    register("far", made := FarStore())
    return made


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "first"
