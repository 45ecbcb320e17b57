"""How many requests the calls on a bucket make: counted, and no more than these."""

from __future__ import annotations

import collections
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.cli import main
from datastates.providers import HostTensorProvider
from datastates.storage import Location, register, stores
from datastates.storage.buckets import Buckets

pytest.importorskip("obstore")
ROOT = "s3://bucket/run"
STEPS = (3, 7)
COUNTED = ("head", "list", "list_with_delimiter", "get", "get_range", "put", "delete")

Requests = collections.Counter[str]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Buckets:
    """A bucket in memory, with two checkpoints."""
    client, made = importlib.import_module("obstore.store").MemoryStore(), Buckets()
    monkeypatch.setattr(Buckets, "_client", lambda *_, **__: client)
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("s3", made)
    return made


def state() -> dict[str, np.ndarray]:
    return {"w": np.arange(5_000_000, dtype=np.float32), "b": np.arange(3.0)}


@pytest.fixture(autouse=True)
def checkpoints(bucket: Buckets) -> None:
    with ds.Checkpointer(ROOT, keep_last=None) as checkpointer:
        for step in STEPS:
            checkpointer.snapshot([HostTensorProvider("model", state())], step=step).wait_committed()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, checkpoints: None) -> Requests:
    """The requests so far, by their kind."""
    obstore, count = importlib.import_module("obstore"), Requests()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            count[name] += 1
            return call(*given, **named)

        return counting

    for name in COUNTED:
        monkeypatch.setattr(obstore, name, counted(name, getattr(obstore, name)))
    return count


def newest() -> str:
    """The address of a checkpoint, found by one list."""
    (found,) = [name for name in stores.store_of(Location(ROOT)).names(Location(ROOT)) if "00000007" in name]
    return f"{ROOT}/{found}"


def open_and_take_one() -> None:
    with ds.open(ROOT) as checkpoint:
        checkpoint["model/b"]


def restore() -> None:
    ds.restore([HostTensorProvider("model", {name: np.zeros_like(array) for name, array in state().items()})], ROOT)


def command(*arguments: str) -> Callable[[], object]:
    def run() -> None:
        assert main([*arguments]) == 0

    return run


FOUND = {"head": 2, "list_with_delimiter": 2, "get": 2}
"""What the place is, and which of its two checkpoints is the newest: their manifests are read for the first time."""
OPENED = {"put": 1, "head": 2, "get": 2, "delete": 1}
"""The checkpoint is held, and is there still; its manifest, and the end of its container; it is held no more."""
EXTENTS, PIECES = 23, 3
"""Requests for the state, by a restore and by ``verify``."""
LISTED = {"get": 2, "head": 2}
"""The manifest of each checkpoint, and the length of its container. The list is shared with what is left of others."""


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: ds.load(ROOT), [FOUND, OPENED, {"get_range": EXTENTS}]),
        (lambda: ds.load(newest()), [{"list_with_delimiter": 1, "head": 1}, OPENED, {"get_range": EXTENTS}]),
        (restore, [FOUND, OPENED, {"get_range": EXTENTS}]),
        (open_and_take_one, [FOUND, OPENED, {"get_range": 1}]),
        (command("ls", ROOT), [FOUND, LISTED]),
        (command("inspect", ROOT), [FOUND, OPENED, {"get": 1}]),
        (command("verify", ROOT), [FOUND, OPENED, {"get_range": PIECES + 1}]),
    ],
    ids=["load", "load a step", "restore", "open", "ls", "inspect", "verify"],
)
def test_requests(requests: Requests, call: Callable[[], object], wanted: list[dict[str, int]]) -> None:
    call()
    assert dict(requests) == dict(sum(map(Requests, wanted), Requests()))


def test_what_is_known_of_a_checkpoint_is_not_asked_again(requests: Requests) -> None:
    ds.load(ROOT)
    requests.clear()
    ds.load(ROOT)
    assert requests["get"] == OPENED["get"]
