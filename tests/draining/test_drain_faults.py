"""Requests of a drain that fail once, are denied, or break against the contract: all is committed, and comes once."""

from __future__ import annotations

import itertools
import tracemalloc
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers
from far_store import FarStore
from fault_server import FaultServer

import datastates as ds
from datastates.commit.tiers import tier_of
from datastates.draining import rounds
from datastates.draining.bring import Part, bring
from datastates.errors import SnapshotTimeoutError, StorageError
from datastates.providers import from_state_dict
from datastates.storage import Location, register, store_of, stores
from datastates.testing import equal

BY_HAND = pytest.mark.by_hand


def state(step: int, nbytes: int = 1000) -> dict[str, Any]:
    return {"w": np.arange(nbytes // 8) + step, "step": step}


def save(checkpointer: ds.Checkpointer, step: int, nbytes: int = 1000) -> None:
    checkpointer.snapshot([from_state_dict("model", state(step, nbytes))], step=step).wait_committed()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    pytest.importorskip("obstore")
    with servers.server("moto", tmp_path_factory.mktemp("moto")) as environment, FaultServer(environment) as faults:
        yield faults


@pytest.fixture
def faults(proxy: FaultServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    from datastates.storage.buckets import Buckets

    for name, value in proxy.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("s3", Buckets(patience=30))
    yield proxy
    proxy.clear()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_SHORTEST", 0.01)
    monkeypatch.setattr(rounds, "_LONGEST", 0.01)


@pytest.mark.by_hand
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["lose", *(pytest.param(f, marks=BY_HAND) for f in ("answer", "cut_up", "cut_down"))])
def test_whichever_request_fails_once_it_comes_once(faults: FaultServer, tmp_path: Path, fault: str) -> None:
    for first in itertools.count(1):
        far = Location(f"s3://bucket/{uuid.uuid4().hex}")
        faults.clear()
        spoiled = faults.add(fault, first=first)
        with ds.Checkpointer(tmp_path / str(first), tiers=str(far)) as checkpointer:
            for step in (1, 2):
                save(checkpointer, step, 12 << 20)  # of two parts
            checkpointer.wait_drained(60)
        met = spoiled.met.is_set()
        faults.clear()
        assert sorted(one.step for one in tier_of(far).checkpoints(certain=True)) == [1, 2]
        for step in (1, 2):
            assert equal(ds.load(str(far), step=step)["model"], state(step, 12 << 20))
        names = store_of(far).entries(far, deep=True)
        assert sum(name.endswith(".pt") for name in names) == 2
        if not met:
            break
    assert first > 20


@pytest.mark.parametrize(
    "denied", [("", ""), ("PUT", ""), ("PUT", "/rank-00000"), ("PUT", "/manifest.json"), ("GET", "")]
)
def test_what_is_denied_is_told_once(
    faults: FaultServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, denied: tuple[str, str]
) -> None:
    far = f"s3://bucket/{uuid.uuid4().hex}"
    with ds.Checkpointer(tmp_path / "first", tiers=far) as checkpointer:
        spoiled = faults.add("answer", *denied, times=10_000, status=403)
        for step in (1, 2, 3):
            save(checkpointer, step)
            assert spoiled.met.wait(60)
            with pytest.raises(SnapshotTimeoutError, match="403"):
                checkpointer.wait_drained(0.3)
        assert checkpointer.failures == 0
        told = [one.getMessage() for one in caplog.records if "wait to be brought" in one.getMessage()]
        assert len(told) == 1, told
        faults.clear()
        checkpointer.wait_drained(60)
    assert sorted(one.step for one in tier_of(Location(far)).checkpoints(certain=True)) == [1, 2, 3]


class Panic(BaseException):
    """No Exception: obstore's own panics are of that kind."""


@pytest.mark.parametrize("request_", ["list", "look", "create", "upload", "piece"])
def test_a_store_that_panics_is_asked_again(tmp_path: Path, store: FarStore, request_: str) -> None:
    left = [request_]

    def panic(request: str, path: Location) -> None:
        if left and request == request_:
            left.pop()
            raise Panic("lost its way")

    store.before = panic
    with ds.Checkpointer(tmp_path / "first", tiers="far://bucket/run") as checkpointer:
        save(checkpointer, 1)
        checkpointer.wait_drained(60)
    assert not left
    assert equal(ds.load("far://bucket/run")["model"], state(1))


class Throttled(FarStore):
    """Takes a piece only once the one before has gone, and holds so many parts of an upload at a time."""

    parts = 4

    def upload(self, path: Location, pieces: Iterator[Any], nbytes: int) -> None:
        in_flight: list[Any] = []
        self._objects[str(path)] = b"", 0  # its bytes are thrown away
        self.sent = 0
        for piece in pieces:
            in_flight = [*in_flight[-self.parts + 1 :], piece]
            self.sent += len(piece)


@pytest.mark.parametrize("source", ["disk", "store"])
def test_a_large_container_is_never_held_whole(tmp_path: Path, store: FarStore, source: str) -> None:
    """Beside the parts in flight lie two pieces, or those that a store is asked for at once."""
    register("slow", slow := Throttled())
    first = Location.of(tmp_path / "first" if source == "disk" else "far://bucket/run")
    with ds.Checkpointer(first.face, host_cache="256MiB") as checkpointer:  # the store holds all pieces
        save(checkpointer, 1, 64 << 20)
    (one,) = tier_of(first).checkpoints()
    target = Location("slow://bucket/run/step-00000001")
    found = tier_of(target.parent).arriving(target, one.attempt, b"")
    piece = store_of(first).traits.best_piece
    beside = 2 if source == "disk" else 8 + 2
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match=r"does not have the \d+ bytes sent"):
            bring(one.path, found, Part())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert slow.sent > 64 << 20
    assert peak < (Throttled.parts + beside) * piece + (2 << 20)
