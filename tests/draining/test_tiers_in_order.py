"""A checkpointer commits to its first tier, and its checkpoints come to the others in the background."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_store import FarStore, Held

import datastates as ds
from datastates._base.waiting import Bell
from datastates.commit.run import Order
from datastates.commit.tiers import tier_of
from datastates.draining import drain, drains, pace, rounds
from datastates.draining.backlog import Backlog
from datastates.errors import FencedError, FormatError, SettingsError, SnapshotTimeoutError, StorageError
from datastates.kept import Keep, TierSettings
from datastates.providers import from_state_dict
from datastates.storage import Location
from datastates.storage.local import LocalStore
from datastates.testing import equal

FAR = "far://bucket/run"


def state(step: int) -> dict[str, Any]:
    generator = np.random.default_rng(step)
    return {"w": generator.normal(size=200_000).astype(np.float32), "b": np.arange(8) + step, "step": step}


def save(checkpointer: ds.Checkpointer, step: int) -> ds.Snapshot:
    taken = checkpointer.snapshot([from_state_dict("model", state(step))], step=step)
    taken.wait_committed()
    return taken


def steps_in(place: Any) -> list[int]:
    """The steps in a place, the oldest first."""
    every = [one for one in tier_of(Location.of(place)).checkpoints() if one.sequence is not None]
    return [one.step for one in sorted(every, key=lambda one: one.sequence or 0)]


def names_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if not path.name.startswith("."))


def test_each_checkpoint_comes_to_every_tier_in_order(first: Path, tmp_path: Path, store: FarStore) -> None:
    shared = tmp_path / "shared"
    with ds.Checkpointer(first, tiers=[shared, FAR]) as checkpointer:
        taken = [save(checkpointer, step) for step in (1, 2, 3)]
        checkpointer.wait_drained()
        assert all(one.report.places == (first, shared, FAR) for one in taken)
        for place in (first, shared, FAR):
            assert steps_in(place) == [1, 2, 3]
            for step in (1, 2, 3):
                assert equal(ds.load(place, step=step)["model"], state(step))
    for step in (1, 2, 3):
        bytes_of = {place: (place / f"step-{step:08d}" / "rank-00000.pt").read_bytes() for place in (first, shared)}
        (path,) = [one.path for one in tier_of(Location(FAR)).checkpoints() if one.step == step]
        attempt = path.name.rpartition(".")[2]
        far = store.read_all(path / f"rank-00000.{attempt}.pt")
        assert bytes_of[first] == bytes_of[shared] == far
        manifests = {(place / f"step-{step:08d}" / "manifest.json").read_bytes() for place in (first, shared)}
        assert len(manifests) == 1


def test_a_long_run_remembers_the_places_of_its_newest(
    first: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "_REPORTED", 2)
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        taken = [save(checkpointer, step) for step in (1, 2, 3)]
        checkpointer.wait_drained()
        assert [one.report.places for one in taken] == [(first,), (first, FAR), (first, FAR)]
        assert len(checkpointer._place.drains._own) == 2


def test_a_dead_store_costs_nothing_and_is_caught_up_with(first: Path, store: FarStore) -> None:
    store.dead = True
    with ds.Checkpointer(first, tiers=FAR, keep_last=1) as checkpointer:
        for step in range(1, 5):
            assert save(checkpointer, step).report.places == (first,)
        with pytest.raises(SnapshotTimeoutError, match="the server does not answer"):
            checkpointer.wait_drained(0.05)
        assert names_in(first) == [f"step-{step:08d}" for step in range(1, 5)]  # it still needs them
        store.dead = False
        checkpointer.wait_drained()
        assert steps_in(FAR) == [1, 2, 3, 4]
        assert names_in(first) == ["step-00000004"]
    for step in range(1, 5):
        assert equal(ds.load(FAR, step=step)["model"], state(step))


def test_a_disk_that_is_dead_from_the_beginning_stops_nobody(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount of a server that is gone: each look at it fails."""
    call, far = LocalStore._call, Location(tmp_path / "far")

    def fail(store: LocalStore, operation: str, path: Location, point: str = "") -> Any:
        if path.is_relative_to(far):
            raise StorageError(errno.ESTALE, operation, str(path))
        return call(store, operation, path, point)

    with monkeypatch.context() as dead:
        dead.setattr(LocalStore, "_call", fail)
        with ds.Checkpointer(first, tiers=far) as checkpointer:
            assert save(checkpointer, 1).committed
    with ds.Checkpointer(first, tiers=far) as checkpointer:
        save(checkpointer, 2)
    assert steps_in(far) == [1, 2]


def test_a_store_that_stays_dead_is_left_to_a_later_run(
    first: Path, store: FarStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.dead = True
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
    assert "datastates drain" in caplog.text
    store.dead = False
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 3)
    assert steps_in(FAR) == [1, 2, 3]


def test_the_newest_goes_first(first: Path, store: FarStore) -> None:
    store.before = held = Held("upload")
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
        assert held.reached.wait(60)
        for step in (2, 3):
            save(checkpointer, step)
        held.go.set()
        checkpointer.wait_drained()
    made = store.requests("upload")
    attempts = {one.path.name.rpartition(".")[2]: one.step for one in tier_of(Location(FAR)).checkpoints()}
    assert [attempts[name.split(".")[1]] for name in made] == [1, 3, 2]


def send_all_but_the_manifest(first: Path, store: FarStore) -> None:
    """The store dies as the checkpoint of step 1 is to be committed there, and comes back."""

    def fail(request: str, path: Location) -> None:
        store.dead = request == "create" and path.name == "manifest.json"

    store.before = fail
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
    assert len(store.requests("upload")) == 1
    store.dead, store.before = False, lambda request, path: None


def test_what_was_sent_is_not_sent_again(first: Path, store: FarStore) -> None:
    send_all_but_the_manifest(first, store)
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 2)
    assert steps_in(FAR) == [1, 2]
    assert len(store.requests("upload")) == 2


def test_a_fenced_attempt_takes_another_name(first: Path, store: FarStore) -> None:
    """A clean-up that came a day later has decided against it: what was sent is gone, and is sent again."""
    send_all_but_the_manifest(first, store)
    store.age(2 * 86_400)
    tier_of(Location(FAR)).sweep()
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 2)
    assert steps_in(FAR) == [1, 2]
    assert equal(ds.load(FAR, step=1)["model"], state(1))


def test_what_was_restored_stays_in_every_place_until_the_next_commit(
    first: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ds.Checkpointer(FAR) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
    with ds.Checkpointer(first, tiers=[TierSettings(FAR, keep_last=1)]) as checkpointer:
        restored = checkpointer.restore([from_state_dict("model", state(0))], step=1)
        assert restored is not None
        with monkeypatch.context() as failing:
            failing.setattr(Order, "sequence", _fail)
            with pytest.raises(OSError, match="no number"):
                save(checkpointer, 2)
        checkpointer.wait_drained()
        assert steps_in(FAR) == [1, 3]
        save(checkpointer, 2)
        checkpointer.wait_drained()
        assert steps_in(FAR) == [2]


def _fail(*words: Any) -> None:
    raise OSError("no number")


def test_each_tier_has_its_own_retention(first: Path, tmp_path: Path, store: FarStore) -> None:
    tiers = [{"path": tmp_path / "second", "keep_last": 3}, TierSettings(path=FAR, keep_last=1, keep_every=2)]
    with ds.Checkpointer(first, tiers=tiers, keep_last=2) as checkpointer:
        for step in range(1, 8):
            save(checkpointer, step)
            checkpointer.wait_drained()
    assert steps_in(first) == [6, 7]
    assert steps_in(tmp_path / "second") == [5, 6, 7]
    assert steps_in(FAR) == [2, 4, 6, 7]


def test_a_tier_that_cannot_be_asked_may_have_the_newest(first: Path, store: FarStore) -> None:
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
        checkpointer.wait_drained()
        store.dead = True
        with pytest.raises(StorageError, match="the server does not answer"):
            checkpointer.restore([from_state_dict("model", state(0))])
        with pytest.raises(StorageError):
            checkpointer.latest()


def test_damage_does_not_travel(first: Path, store: FarStore, caplog: pytest.LogCaptureFixture) -> None:
    store.dead = True
    with ds.Checkpointer(first, tiers=FAR, keep_last=9) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
        path = first / "step-00000002" / "rank-00000.pt"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        store.dead = False
        checkpointer.wait_drained()
    assert steps_in(FAR) == [1, 3]
    assert "'model/w'" in caplog.text
    assert not any("00000002" in name for name in store.entries(Location(FAR), deep=True))


def test_a_newer_run_fences_the_drains_of_an_older_one(
    first: Path, tmp_path: Path, store: FarStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ds.Checkpointer(first, tiers=FAR) as old:
        save(old, 1)
        old.wait_drained()
        with monkeypatch.context() as context:
            context.setattr("datastates.commit.object_opening.owner_of", lambda process: "another process")
            context.setattr("datastates.commit.fence.owner_of", lambda process: "another process")
            with ds.Checkpointer(tmp_path / "other", tiers=FAR) as new:
                save(new, 5)
        save(old, 2)
        with pytest.raises(FencedError, match="a newer run saves in"):
            old.wait_drained()
    assert steps_in(FAR) == [1, 5]
    assert "nothing is brought" in caplog.text


def test_a_snapshot_in_flight_comes_first(first: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain waits for it between two pieces, but goes on in the end: there may always be one."""
    waits: list[float | None] = []
    monkeypatch.setattr(pace, "_PIECE", 1)
    monkeypatch.setattr(pace, "_ASIDE", 0.001)
    wait = Bell.wait_for

    def wait_for(self: Bell, holds: Any, timeout: float | None = None) -> Any:
        if timeout == 0.001:
            waits.append(timeout)
        return wait(self, holds, timeout)

    monkeypatch.setattr(Bell, "wait_for", wait_for)
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
        checkpointer.wait_drained()
        assert not waits
        store.asked.clear()
        (one,) = checkpointer._place.drains._every
        one._pace._is_busy = lambda: True
        save(checkpointer, 2)
        checkpointer.wait_drained()
    assert len(waits) == len(store.requests("piece"))
    assert steps_in(FAR) == [1, 2]


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        (["nowhere://bucket/run"], "nowhere"),
        ([{"path": "/x", "keep": 3}], r"tiers: the tier /x: keep: unknown setting"),
        ([{"path": "/x", "keep_last": 0}], r"tiers: the tier /x: keep_last: Input should be greater"),
        ([{"keep_last": 1}], r"tiers: the tier .* has no path"),
        ([3], "tiers"),
        ([FAR, FAR], f"{FAR} is given twice"),
        ([FAR, f"{FAR}/sub"], "lie in one another"),
    ],
)
def test_impossible_tiers_are_refused(first: Path, store: FarStore, tiers: Any, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        ds.Checkpointer(first, tiers=tiers)


def test_the_first_tier_is_no_further_one(first: Path, tmp_path: Path) -> None:
    first.mkdir()
    (tmp_path / "link").symlink_to(first)
    for tier in (first, tmp_path / "link"):
        with pytest.raises(SettingsError, match="given twice"):
            ds.Checkpointer(first, tiers=tier)


def test_a_tier_is_checked_where_it_is_made() -> None:
    with pytest.raises(SettingsError, match=r"the tier s3://b/r: keep_lst: unknown setting"):
        TierSettings("s3://b/r", keep_lst=3)  # type: ignore[call-arg]
    assert TierSettings("s3://b/r", keep_last=3) == TierSettings(path="s3://b/r", keep_last=3)


def test_who_only_reads_brings_nothing(first: Path, store: FarStore) -> None:
    with ds.Checkpointer(first) as checkpointer:
        save(checkpointer, 1)
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        assert checkpointer.latest() == 1
    assert not store.entries(Location(FAR), deep=True)


def test_a_manifest_that_is_garbled_is_no_checkpoint_to_bring(first: Path, store: FarStore) -> None:
    with ds.Checkpointer(first) as checkpointer:
        save(checkpointer, 1)
    (first / "step-00000001" / "manifest.json").write_bytes(b"{")
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 2)
    assert steps_in(FAR) == [2]
    with pytest.raises(FormatError):
        ds.load(first, step=1)


def test_who_hurries_drops_all_but_the_newest(first: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGTERM: an older checkpoint that is on its way is given up, too, and goes on later."""
    store.before = held = Held("piece")
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
        assert held.reached.wait(60)
        for step in (2, 3):
            save(checkpointer, step)
        (one,) = checkpointer._place.drains._every
        go_on, drained = one.go_on, []
        monkeypatch.setattr(one, "go_on", lambda: (drained.append(one.wait(0)), go_on()))
        hurrying = threading.Thread(target=checkpointer._finish, args=(None,))
        hurrying.start()
        while not one._hurries:
            pass
        held.go.set()
        hurrying.join()
        checkpointer.wait_drained()  # the process lives on
    assert drained == [False]  # who waits for all is not told that the newest is enough
    assert steps_in(FAR) == [1, 2, 3]
    attempts = {one.path.name.rpartition(".")[2]: one.step for one in tier_of(Location(FAR)).checkpoints()}
    assert [attempts[name.split(".")[1]] for name in store.requests("upload")] == [1, 3, 2, 1]


def test_who_hurries_does_not_wait_for_a_dead_store(first: Path, store: FarStore) -> None:
    store.dead = True
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
        checkpointer._finish(time.monotonic() + 3600)
    assert steps_in(first) == [1]


def test_what_earlier_runs_left_does_not_hold_the_first_commit_up(first: Path, store: FarStore) -> None:
    """The target is asked before anything is brought."""
    with ds.Checkpointer(first) as checkpointer:
        save(checkpointer, 1)
    store.before = held = Held("upload")
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        checkpointer._place.drains.begin()
        assert held.reached.wait(60)
        (one,) = checkpointer._place.drains._every
        assert save(checkpointer, 2).committed
        assert one.backlog.newest == 0
        held.go.set()
    assert steps_in(FAR) == [1, 2]


def test_a_silent_store_holds_only_the_first_commit_up(
    first: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    wait = Bell.wait_for

    def wait_for(self: Bell, holds: Any, timeout: float | None = None) -> Any:
        if timeout == 0.05:
            waits.append(timeout)
        return wait(self, holds, timeout)

    monkeypatch.setattr(drain, "_AHEAD", 0.05)
    monkeypatch.setattr(Bell, "wait_for", wait_for)
    store.before = held = Held("list")
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
        assert len(waits) == 1
        held.go.set()
    assert steps_in(FAR) == [1, 2, 3]


def test_what_was_given_up_is_told(first: Path, store: FarStore) -> None:
    store.dead = True
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
    with pytest.raises(SnapshotTimeoutError, match=r"brought to far://bucket/run: .*the server does not answer"):
        checkpointer.wait_drained()


def test_close_does_not_sleep_where_the_last_try_has_just_failed(
    first: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be called while a try is under way."""
    monkeypatch.setattr(rounds, "_SHORTEST", 3600.0)
    monkeypatch.setattr(rounds, "_LONGEST", 3600.0)
    checkpointer = ds.Checkpointer(first, tiers=FAR)
    (one,) = checkpointer._place.drains._every
    fail = one._failed

    def failed(text: str, *, is_new: bool = True) -> float | None:
        pause = fail(text, is_new=is_new)
        one._closing = first.exists() and bool(steps_in(first))  # not before it has decided to try again
        return pause

    monkeypatch.setattr(one, "_failed", failed)
    monkeypatch.setattr(drain, "_AHEAD", 0.01)
    store.dead = True
    save(checkpointer, 1)
    checkpointer.close()
    assert steps_in(first) == [1]


def test_after_sigterm_a_silent_store_is_not_waited_for_without_end(
    first: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "UNTOLD", 0.01)
    monkeypatch.setattr(drain, "_AHEAD", 0.01)
    store.before = held = Held("list")
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1)
        assert held.reached.wait(60)
        checkpointer._finish(None)
        held.go.set()
    assert steps_in(FAR) == [1]


def test_a_rank_does_not_send_what_the_target_will_not_keep(first: Path, tmp_path: Path) -> None:
    """It knows nothing of the target, but the checkpoints of its own run."""
    with ds.Checkpointer(first) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
    backlog = Backlog([tier_of(Location(first))], tier_of(Location(tmp_path / "far")), Keep(last=1, every=2))
    for step in (1, 2, 3):
        backlog.add(Location(first / f"step-{step:08d}"))
    backlog.drop_outdated()
    assert [path.name for path in backlog._own] == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("looks", [Backlog.due, Backlog.drop_outdated], ids=["rank 0", "another rank"])
def test_the_newest_is_not_the_one_that_was_committed_last(
    looks: Callable[[Backlog], object], first: Path, tmp_path: Path
) -> None:
    with ds.Checkpointer(first) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
    backlog = Backlog([tier_of(Location(first))], tier_of(Location(tmp_path / "far")), Keep())
    for step in (2, 1):
        backlog.add(Location(first / f"step-{step:08d}"))
    looks(backlog)
    assert backlog.own_newest() == Location(first / "step-00000002")
