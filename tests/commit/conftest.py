"""A place in a store of objects in memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from interleavings import Script
from object_place import ROOT, SHORT, Answers

from datastates.commit import decision, object_kept, object_pending, object_tier
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


class Clock:
    """The clock of a process, which only sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    store = Script()
    start, clock = store.start, SimpleNamespace()

    def begin(answers: list[object]) -> None:
        start(answers)
        clock.monotonic, clock.sleep = (one := Clock()).monotonic, one.sleep

    monkeypatch.setattr(store, "start", begin)
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", store)
    monkeypatch.setattr(decision, "time", clock)
    monkeypatch.setattr(object_pending, "now", store.clock)
    monkeypatch.setattr(object_tier, "_facts", object_tier._facts.__wrapped__)
    for module in (object_kept, object_tier):
        monkeypatch.setattr(module, "each", lambda call, of, most: [call(one) for one in of])
    monkeypatch.setattr(object_tier, "log", SimpleNamespace(warning=lambda *words: None))
    monkeypatch.setattr(ObjectTier, "_now", lambda tier: store.now(ROOT))
    monkeypatch.setattr(object_tier.secrets, "token_hex", lambda nbytes: "0" * 2 * nbytes)
    return store
