"""Which checkpoint is the newest of several places: a number is above all that is known, and not below the clock."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_store import FarStore

import datastates as ds
from datastates.commit import run
from datastates.commit.tiers import tier_of
from datastates.draining import drain
from datastates.draining.by_hand import bring_each, lacking
from datastates.providers import from_state_dict
from datastates.storage import Location
from datastates.testing import equal

FAR = "far://bucket/run"


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(1000) + step, "step": step}


def save(checkpointer: ds.Checkpointer, step: int) -> None:
    checkpointer.snapshot([from_state_dict("model", state(step))], step=step).wait_committed()


def steps_in(place: Any) -> list[int]:
    """The steps in a place, the oldest first."""
    every = tier_of(Location.of(place)).checkpoints(certain=True)
    return [one.step for one in sorted(every, key=lambda one: one.sequence or 0)]


@pytest.mark.parametrize("late", [False, True])
def test_a_fresh_disk_goes_on_above_what_the_store_has(
    first: Path, tmp_path: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Also where the store could not be asked before the first checkpoints got their numbers."""
    with ds.Checkpointer(tmp_path / "lost", tiers=FAR) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
    store.dead = late
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 2)
        save(checkpointer, 1)
        store.dead = False
        checkpointer.wait_drained()
        save(checkpointer, 0)
        checkpointer.wait_drained()
        assert checkpointer.latest() == 0
    assert steps_in(first) == [2, 1, 0]
    assert steps_in(FAR)[-3:] == [2, 1, 0]
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        assert checkpointer.latest() == 0


@pytest.mark.parametrize("later", ["a run", "a command", "two runs"])
def test_a_fresh_disk_that_never_heard_of_the_store_is_newer(
    first: Path, tmp_path: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """Each run ends before the store answers: nothing but the time tells which state is the newest."""
    monkeypatch.setattr(drain, "_AHEAD", 0.01)
    monkeypatch.setattr(run, "clock", partial(next, itertools.count(1000)))
    with ds.Checkpointer(tmp_path / "lost", tiers=FAR) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
    store.dead = True
    for place, step in ((tmp_path / "lost too", 5), (first, 4))[later != "two runs" :]:
        with ds.Checkpointer(place, tiers=FAR) as checkpointer:
            save(checkpointer, step)
    store.dead = False
    if later == "a command":
        (brought,) = bring_each(lacking(Location(first), Location(FAR)), Location(FAR), lambda *words: None)
        assert brought.damage is None
    elif later == "two runs":
        with ds.Checkpointer(tmp_path / "lost too", tiers=FAR) as checkpointer:
            assert checkpointer.latest() == 5
            checkpointer._place.drains.begin()
            checkpointer.wait_drained()
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        assert checkpointer.latest() == 4
        live = state(0)
        assert checkpointer.restore([from_state_dict("model", live)]) is not None
        assert equal(live, state(4))


def test_an_old_disk_that_never_heard_of_the_store_is_older(
    first: Path, tmp_path: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job goes on elsewhere, and comes back to a disk that was left before."""
    monkeypatch.setattr(drain, "_AHEAD", 0.01)
    monkeypatch.setattr(run, "clock", partial(next, itertools.count(1000)))
    store.dead = True
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
    store.dead = False
    with ds.Checkpointer(tmp_path / "elsewhere", tiers=FAR) as checkpointer:
        save(checkpointer, 2)
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        assert checkpointer.latest() == 2


def test_a_clock_that_is_wrong_changes_nothing_where_all_is_known(
    first: Path, tmp_path: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(10**15, -(10**14))
    monkeypatch.setattr(run, "clock", partial(next, clock))
    for place, step in ((first, 3), (first, 2), (tmp_path / "other", 1), (first, 0)):
        with ds.Checkpointer(place, tiers=FAR) as checkpointer:
            save(checkpointer, step)
            checkpointer.wait_drained()
            assert checkpointer.latest() == step
    assert steps_in(FAR) == [3, 2, 1, 0]
    assert next(clock) < 10**15


def test_what_was_restored_from_afar_is_older_than_what_follows(first: Path, tmp_path: Path, store: FarStore) -> None:
    """Also where the store fails from then on, and the run ends before it has got anything."""
    with ds.Checkpointer(tmp_path / "lost", tiers=FAR) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        assert checkpointer.restore([from_state_dict("model", state(0))]) is not None
        store.dead = True
        save(checkpointer, 4)
    assert steps_in(first) == [4]
    store.dead = False
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        restored = checkpointer.restore([from_state_dict("model", live := state(0))])
        assert restored is not None
        assert restored.step == 4
        assert equal(live, state(4))


def test_the_newest_of_all_places_is_restored(first: Path, tmp_path: Path, store: FarStore) -> None:
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
    with ds.Checkpointer(tmp_path / "fresh", tiers=FAR) as checkpointer:
        live = state(0)
        restored = checkpointer.restore([from_state_dict("model", live)])
        assert restored is not None
        assert (restored.step, str(restored.path).rpartition("/")[0]) == (2, FAR)
        assert equal(live, state(2))
        assert checkpointer.steps() == [1, 2]
        save(checkpointer, 3)
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:  # this disk is older than the store
        assert checkpointer.latest() == 3
        restored = checkpointer.restore([from_state_dict("model", live)])
        assert restored is not None
        assert restored.step == 3
        restored = checkpointer.restore([from_state_dict("model", live)], step=2)
        assert restored is not None
        assert restored.path == first / "step-00000002"
