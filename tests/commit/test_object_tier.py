"""Checkpoints in a store of objects appear with their manifest, and go behind a mark, beside readers and other runs."""

from __future__ import annotations

import uuid

import pytest
from aged_store import AgedStore

from datastates.commit.tiers import tier_of
from datastates.storage import Location, register, stores
from datastates.testing import TierTests


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> AgedStore:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", made := AgedStore())
    return made


class TestMemory(TierTests):
    @pytest.fixture(autouse=True)
    def _made(self, store: AgedStore) -> None:
        self.store = store
        self.tier = tier_of(Location(f"mem://bucket/{uuid.uuid4().hex}"))

    def age(self) -> None:
        self.store.age(25 * 3600)
