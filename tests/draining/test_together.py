"""Several processes bring one checkpoint to one place, and some of them die: it comes once, bit for bit."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers
from far_store import FarStore

import datastates as ds
from datastates.commit.tiers import tier_of
from datastates.draining import by_hand
from datastates.draining.bring import Part, bring
from datastates.draining.by_hand import Brought, bring_each, lacking
from datastates.errors import CheckpointNotFoundError
from datastates.providers import from_state_dict
from datastates.storage import Location, register, store_of, stores
from datastates.storage.buckets import Buckets
from datastates.testing import equal

PLACES = ["disk", "store"]


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(3 << 20) + step, "step": step}


def save(checkpointer: ds.Checkpointer, step: int) -> None:
    checkpointer.snapshot([from_state_dict("model", state(step))], step=step).wait_committed()


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path, store: FarStore) -> Location:
    return Location.of(tmp_path / "target" if request.param == "disk" else "far://bucket/run")


def drained(source: Path, target: Location, progress: Callable[[int], object] = lambda count: None) -> list[Brought]:
    """What ``datastates drain`` does. ``progress`` is told how many pieces have gone, this one included."""
    count = iter(range(1, 1 << 30))
    return list(bring_each(lacking(Location(source), target), target, lambda nbytes, total: progress(next(count))))


def check(target: Location, *steps: int, kept: bool = True) -> None:
    """Each step is there once, bit for bit, and with ``kept`` nothing lies there that no manifest names."""
    found = tier_of(target).checkpoints(certain=True)
    assert sorted(one.step for one in found) == sorted(steps)
    for one in found:
        assert equal(ds.load(one.path.face)["model"], state(one.step))
        containers = [name for name in store_of(target).entries(one.path, deep=True) if "rank-" in name]
        assert len(containers) == 1
    every = [name for name in store_of(target).entries(target, deep=True) if "rank-" in name]
    assert not kept or len(every) == len(steps)


@pytest.mark.parametrize("target", PLACES, indirect=True)
@pytest.mark.parametrize("at", [1, 2, 100], ids=["at the first piece", "between two", "with the last"])
def test_another_drain_comes_between(first: Path, target: Location, at: int) -> None:
    with ds.Checkpointer(first) as checkpointer:
        save(checkpointer, 1)
    pieces = 0

    def count(number: int) -> None:
        nonlocal pieces
        pieces = number

    drained(first, target.parent / "counted", count)
    others: list[Brought] = []

    def between(number: int) -> None:
        if number == min(at, pieces):
            others.extend(drained(first, target))

    (own,), (other,) = drained(first, target, between), others
    assert (own.damage, other.damage) == (None, None)
    assert own.path == other.path
    check(target, 1)


@pytest.mark.parametrize("target", PLACES, indirect=True)
def test_another_drain_comes_before_the_first_byte(first: Path, target: Location) -> None:
    """It does not come once more as a revision."""
    with ds.Checkpointer(first) as checkpointer:
        save(checkpointer, 1)
    (one,) = tier_of(Location(first)).checkpoints()
    tier = tier_of(target)
    tier.make()
    found = tier.arriving(target / "step-00000001", one.attempt, b"")
    assert not isinstance(found, Location)
    (other,) = drained(first, target)
    assert bring(one.path, found, Part()) == other.path
    check(target, 1, kept=False)
    tier.sweep()
    check(target, 1)


SCRIPT = """
import os, signal, sys
import numpy as np
import datastates as ds
from datastates.commit import carry
from datastates.providers import from_state_dict

first, target, end, *steps = sys.argv[1:]
def kill(*words):
    os.kill(os.getpid(), signal.SIGKILL)

if end == "while a container goes up":
    copy = carry.every_byte.read
    def read(*words):
        yield next(copy(*words))
        kill()
    carry.every_byte.read = read
if end == "before the manifest":
    from datastates.commit.object_pending import ObjectPending
    from datastates.commit.pending import Pending
    commit = Pending.commit, ObjectPending.commit
    def unless_first(which):
        def call(self, made, *words):
            if str(self.target).startswith(target):
                kill()
            return commit[which](self, made, *words)
        return call
    Pending.commit, ObjectPending.commit = unless_first(0), unless_first(1)
if end == "after the manifest":
    from datastates.commit.run import Run
    retain = Run.retain
    Run.retain = lambda self: kill() if str(self.tier.root) == target else retain(self)
with ds.Checkpointer(first, tiers=target) as checkpointer:
    for step in map(int, steps):
        state = {"w": np.arange(3 << 20) + step, "step": step}
        checkpointer.snapshot([from_state_dict("model", state)], step=step).wait_committed()
    checkpointer.wait_drained(50)
"""
ENDS = ["while a container goes up", "before the manifest", "after the manifest"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["disk", pytest.param("moto", marks=pytest.mark.by_hand)])
@pytest.mark.parametrize("end", ENDS)
def test_the_next_run_brings_what_a_killed_one_has_left(end: str, kind: str, tmp_path: Path, ranks: Any) -> None:
    first, target = tmp_path / "first", Location.of(tmp_path / "target")
    with contextlib.ExitStack() as stack:
        variables = {}
        if kind == "moto":
            pytest.importorskip("obstore")
            (folder := tmp_path / "server").mkdir()
            variables = stack.enter_context(servers.server("moto", folder))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(stores, "KINDS", dict(stores.KINDS))
            register("s3", Buckets(patience=5))  # one for this server
            target = Location("s3://bucket/run")
        (killed,) = ranks(1, SCRIPT, first, target, end, 1, may_fail=(0,), alone=True, **variables)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        check(target, *([1] if end == ENDS[2] else []), kept=False)
        assert equal(ds.load(first)["model"], state(1))
        ranks(1, SCRIPT, first, target, "", 2, alone=True, **variables)
        check(target, 1, 2)


@pytest.mark.parametrize("target", PLACES, indirect=True)
def test_a_source_that_is_deleted_meanwhile_costs_itself_alone(first: Path, target: Location) -> None:
    """A user's ``rm`` minds no lock: what is copied comes whole or not at all, and training goes on."""
    with ds.Checkpointer(first, tiers=target.face) as checkpointer:
        (one,) = checkpointer._place.drains._every
        busy, gone = one._pace._is_busy, []

        def delete() -> bool:
            if not gone:
                gone.append(1)
                shutil.rmtree(first / "step-00000001")
            return busy()

        one._pace._is_busy = delete
        save(checkpointer, 1)
        checkpointer.wait_drained(50)
        assert gone
        save(checkpointer, 2)
        checkpointer.wait_drained(50)
        there = sorted(one.step for one in tier_of(target).checkpoints(certain=True))
        assert there in ([1, 2], [2])
    check(target, *there, kept=False)


@pytest.mark.parametrize("target", PLACES, indirect=True)
@pytest.mark.parametrize("when", ["as it is listed", "before it is brought"])
def test_a_run_deletes_what_a_command_is_to_bring(
    first: Path, target: Location, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run keeps in its stead is brought."""
    with ds.Checkpointer(first, keep_last=1) as checkpointer:
        save(checkpointer, 1)
        opened, look = by_hand._opened, partial(lacking, Location(first), target, only_newest=True)

        def open_once(path: Location) -> Any:
            monkeypatch.setattr(by_hand, "_opened", opened)
            save(checkpointer, 2)
            return opened(path)

        if when == "as it is listed":
            monkeypatch.setattr(by_hand, "_opened", open_once)
        paths = look()
        if when == "before it is brought":
            save(checkpointer, 2)
            with pytest.raises(CheckpointNotFoundError):
                list(bring_each(paths, target, lambda *words: None))
        (brought,) = bring_each(paths, target, lambda *words: None, look)
        assert brought.damage is None
    check(target, 2)


@pytest.mark.parametrize("target", PLACES, indirect=True)
def test_a_run_deletes_what_a_reader_has_listed(target: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader finds what was committed in its stead, and not something much older."""
    with ds.Checkpointer(target.face, keep_last=1, keep_every=10) as checkpointer:
        save(checkpointer, 10)
        save(checkpointer, 11)
        tier, look = tier_of(target), type(tier_of(target))._look
        first, saved = threading.Lock(), threading.Event()

        def look_late(self: Any, name: str, *words: Any, **more: Any) -> Any:
            monkeypatch.setattr(type(tier), "_look", look)
            if first.acquire(blocking=False):  # a store looks at several at once
                save(checkpointer, 12)
                saved.set()
            assert saved.wait(60)
            return look(self, name, *words, **more)

        monkeypatch.setattr(type(tier), "_look", look_late)
        assert [one.step for one in tier.checkpoints()] == [10, 12]
