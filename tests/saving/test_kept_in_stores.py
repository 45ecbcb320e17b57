"""In a store of objects, checkpoints name one kept container, which lies beside them until none does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from command import run, run_json

import datastates as ds
from datastates.commit import manifest
from datastates.commit.object_tier import ObjectTier
from datastates.errors import DatastatesError, StorageError
from datastates.providers import from_state_dict
from datastates.storage import Entry, Location, register, stores

torch = pytest.importorskip("torch")
saves = pytest.importorskip("whole_saves")
AgedStore = pytest.importorskip("aged_store").AgedStore

ROOT = Location("mem://bucket/run")
DAY = 86_400.0
State = dict[str, Any]


class Watched(AgedStore):
    """Notes reads and uploads, and fails at names that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[str] = []
        self.looks: list[str] = []
        self.fails: set[str] = set()

    def upload(self, path: Location, pieces: Iterator[Any], nbytes: int) -> None:
        self.uploads.append(path.name)
        super().upload(path, pieces, nbytes)

    def look(self, path: Location) -> Entry | None:
        self.looks.append(str(path))
        return super().look(path)

    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        if path.name in self.fails:
            raise StorageError(0, "read", str(path), f"read {path}: the server is busy")
        return super().read(path, offset, nbytes)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", made := Watched())
    return made


def saved(steps: range, state: State, **options: Any) -> tuple[dict[int, State], list[str]]:
    """Save some steps, each with another ``large.2``; returns what was saved, and why each was written in full."""
    expected, in_full = {}, []
    with ds.Checkpointer(ROOT, incremental=True, **options) as checkpointer:
        if steps.start:
            checkpointer.restore([from_state_dict("state", saves.copy_of(state))])
        for step in steps:
            state["large.2"] += 1
            in_full.append(saves.save(checkpointer, state, step)["in_full"])
            expected[step] = saves.copy_of(state)
    return expected, in_full


def at(step: int) -> Location:
    (found,) = (one.path for one in ObjectTier(ROOT).checkpoints() if one.step == step)
    return found


def kept_of(step: int) -> Location:
    """The kept container of a checkpoint."""
    return manifest.files_of(at(step), manifest.open(at(step)))[1][0]


def folders(store: Watched) -> list[str]:
    return sorted(name for name in store.names(ROOT) if name.startswith("kept-"))


def sweep() -> None:
    ObjectTier(ROOT).sweep()


def test_it_is_written_once_and_each_checkpoint_stands_alone(store: Watched) -> None:
    expected, in_full = saved(range(6), saves.a_state())
    assert list(map(bool, in_full)) == [True, True, False, False, False, False]
    assert len({kept_of(step) for step in range(1, 6)}) == 1
    tier = ObjectTier(ROOT)
    for step in (1, 3, 4):  # any other one may go
        assert tier.remove(at(step))
    sweep()
    for step in (0, 2, 5):
        saves.assert_equal(ds.load(str(at(step)))["state"], expected[step])
        live = saves.blank(expected[step])
        with ds.Checkpointer(ROOT) as checkpointer:
            checkpointer.restore([from_state_dict("state", live)], step=step)
        saves.assert_equal(live, expected[step])


def test_a_save_asks_for_its_mark_and_reads_its_index(store: Watched) -> None:
    state = saves.a_state()
    with ds.Checkpointer(ROOT, incremental=True) as checkpointer:
        for step in range(4):
            state["large.2"] += 1
            store.looks.clear()
            saves.save(checkpointer, state, step)
    assert [look for look in store.looks if "kept" in look and look.endswith(".ended")] == [
        f"{kept_of(3).parent}.ended"
    ]


def test_a_run_that_restores_goes_on_with_it(store: Watched) -> None:
    state = saves.a_state()
    saved(range(3), state)
    _, in_full = saved(range(3, 5), state)
    assert in_full == ["", ""]
    assert kept_of(4) == kept_of(1)


def test_what_no_checkpoint_names_goes_after_days(store: Watched) -> None:
    state = saves.a_state()
    saved(range(3), state)
    saved(range(3, 5), state, full_every=1)
    tier = ObjectTier(ROOT)
    for step in (1, 2, 3):
        tier.remove(at(step))
    first = kept_of(4).parent.name
    assert len(folders(store)) == 3
    sweep()
    assert len(folders(store)) == 3  # somebody may be writing there
    store.age(DAY + 1)
    sweep()
    assert len(folders(store)) == 5  # with marks
    store.age(7 * DAY)
    sweep()
    assert len(folders(store)) == 5  # somebody may have looked before the mark
    store.age(DAY + 1)
    sweep()
    assert len([name for name in folders(store) if not name.endswith(".ended")]) == 1
    store.age(7 * DAY)
    sweep()
    assert folders(store) == [first]
    saves.assert_equal(ds.load(ROOT.face)["state"], state)


def test_a_long_run_lets_them_go_too(store: Watched) -> None:
    state = saves.a_state()
    with ds.Checkpointer(ROOT, incremental=True, keep_last=1, full_every=2) as checkpointer:
        for step in range(12):
            store.age(DAY * 2)
            state["large.2"] += 1
            saves.save(checkpointer, state, step)
    whole = [name for name in folders(store) if not name.endswith(".ended")]
    assert kept_of(11).parent.name in whole
    assert len(whole) <= 4  # of six
    saves.assert_equal(ds.load(ROOT.face)["state"], state)


def test_behind_a_mark_it_is_written_anew(store: Watched) -> None:
    state = saves.a_state()
    with ds.Checkpointer(ROOT, incremental=True) as checkpointer:
        for step in range(3):
            saves.save(checkpointer, state, step)
        before = kept_of(2).parent
        store.create(before.with_name(f"{before.name}.ended"), b"ended\n")
        in_full = [saves.save(checkpointer, state, step)["in_full"] for step in range(3, 5)]
    assert list(map(bool, in_full)) == [True, False]
    assert kept_of(3) == kept_of(4) != kept_of(2)


def test_a_store_that_fails_at_times_is_asked_again(store: Watched, caplog: pytest.LogCaptureFixture) -> None:
    state = saves.a_state()
    with ds.Checkpointer(ROOT, incremental=True) as checkpointer:
        for step in range(8):
            if step in (3, 4, 6):
                store.fails = {"rank-00000.kept.pt"}
            in_full = saves.save(checkpointer, state, step)["in_full"]
            store.fails = set()
            assert bool(in_full) == (step in (0, 1, 3, 4, 6)), in_full
    assert not [one for one in caplog.records if "incremental" in one.getMessage()]


@pytest.mark.parametrize("name", ["step-00000001.0a1b2c3d", "best", "a%b"])
def test_what_cannot_be_read_lets_nothing_go(
    name: str, store: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(range(3), saves.a_state())
    for step in range(3):
        ObjectTier(ROOT).remove(at(step))
    store.create(ROOT / name / manifest.FILE, manifest.FENCE if name.startswith("step-") else b"{}")
    read_all = store.read_all

    def refused(path: Location, most: int | None = None) -> bytes:
        if path == ROOT / name / manifest.FILE:
            raise StorageError(0, "read", str(path), f"read {path}: the server is busy")
        return bytes(read_all(path, most))

    with monkeypatch.context() as patch:
        patch.setattr(store, "read_all", refused)
        for _ in range(3):
            store.age(9 * DAY)
            sweep()
    assert len([one for one in folders(store) if not one.endswith(".ended")]) == 1
    assert any("kept containers stay in" in one.getMessage() for one in caplog.records)
    for _ in range(2):
        store.age(9 * DAY)
        sweep()
    assert [one for one in folders(store) if not one.endswith(".ended")] == []


def test_a_manifest_that_is_garbled_lets_nothing_go(store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = saved(range(3), saves.a_state())
    for step in range(2):
        ObjectTier(ROOT).remove(at(step))
    tier, open_, folder = ObjectTier(ROOT), store.read_all, kept_of(2).parent.name
    with monkeypatch.context() as patch:  # once, in a process that lives on
        patch.setattr(
            store, "read_all", lambda *words: open_(*words).replace(folder.encode(), b"kept-00000077.0a1b2c3d")
        )
        store.age(9 * DAY)
        tier.sweep()
    for _ in range(2):
        store.age(9 * DAY)
        tier.sweep()
    saves.assert_equal(ds.load(str(at(2)))["state"], expected[2])


def test_a_copy_of_a_checkpoint_beside_it_keeps_it(store: Watched) -> None:
    expected, _ = saved(range(3), saves.a_state())
    for name, data in [(name, store.read_all(at(2) / name)) for name in store.names(at(2))]:
        store.create(ROOT / "best" / name, data)
    for step in range(3):
        ObjectTier(ROOT).remove(at(step))
    for _ in range(3):
        store.age(9 * DAY)
        sweep()
    saves.assert_equal(ds.load(str(ROOT / "best"))["state"], expected[2])


def test_a_snapshot_that_fails_leaves_nothing(store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saves.a_state()
    with ds.Checkpointer(ROOT, incremental=True, on_error="warn") as checkpointer:
        saves.save(checkpointer, state, 0)
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "encode", lambda made: (_ for _ in ()).throw(StorageError(5, "write", "x")))
            with pytest.raises(DatastatesError):
                saves.save(checkpointer, state, 1)
        assert folders(store) == []
        assert saves.save(checkpointer, state, 2)["in_full"]
        assert saves.save(checkpointer, state, 3)["in_full"] == ""


def test_ls_and_inspect_tell_what_is_shared(store: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    saved(range(4), saves.a_state())
    found = run_json(capsys, "ls", ROOT, "--added")[1]["checkpoints"]
    whole = [sum(nbytes for _, nbytes in manifest.files_of(at(step), manifest.open(at(step)))) for step in range(4)]
    kept = store.length(kept_of(1))
    assert [one["added"] for one in found] == [whole[0], whole[1], whole[2] - kept, whole[3] - kept]
    assert run(capsys, "inspect", at(3))[1].count(" with step ") == 2
