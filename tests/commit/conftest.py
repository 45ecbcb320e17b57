"""A place in a store of objects in memory."""

from __future__ import annotations

import pytest
from object_place import ROOT, SHORT, Answers

from datastates.commit.object_tier import ObjectTier
from datastates.storage import register, stores


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", made := Answers())
    return made


@pytest.fixture
def tier(store: Answers) -> ObjectTier:
    return ObjectTier(ROOT, SHORT)
