"""Checkpoints with kept containers in further tiers: each is sent once, and the nearest whole file is read."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from far_store import FarStore
from whole_saves import a_state, as_two_ranks, assert_equal, blank, copy_of, save

import datastates as ds
from datastates.cli import commands
from datastates.commit import carry, manifest
from datastates.commit.tiers import tier_of
from datastates.config import Options
from datastates.errors import StorageError
from datastates.formats import own
from datastates.providers import from_state_dict
from datastates.storage import Location
from datastates.storage.local import LocalStore

FAR = "far://bucket/run"
pytestmark = pytest.mark.usefixtures("linking")


def saved(first: Path, further: list[Any]) -> dict[int, dict[str, Any]]:
    state, expected = a_state(), {}
    with ds.Checkpointer(first, tiers=further, incremental=True) as checkpointer:
        for step in range(3):
            state["large.1"] += 1
            save(checkpointer, state, step)
            expected[step] = copy_of(state)
        checkpointer.wait_drained()
    return expected


def gone_on(first: Path, further: Any, last: dict[str, Any]) -> dict[str, Any]:
    """Restore, and save step 3; returns its state."""
    state = copy_of(last)
    with ds.Checkpointer(first, tiers=further, incremental=True) as checkpointer:
        checkpointer.restore([from_state_dict("state", blank(state))])
        state["small.0"] += 1
        save(checkpointer, state, 3)
        checkpointer.wait_drained()
    return state


def test_each_tier_has_the_whole_state(first: Path, tmp_path: Path, store: FarStore) -> None:
    shared = tmp_path / "shared"
    expected = saved(first, [shared, FAR])
    kept = [path.stat() for path in sorted(shared.glob("step-*/rank-00000.kept.pt"))]
    assert [one.st_nlink for one in kept] == [2, 2]
    for place in (shared, FAR):
        for one in tier_of(Location.of(place)).checkpoints():
            assert_equal(ds.load(one.path.face)["state"], expected[one.step])
            assert list(own.open(one.path).verify(lambda nbytes: None)) == []
    live = blank(expected[2])
    with ds.Checkpointer(FAR) as checkpointer:
        assert checkpointer.restore([from_state_dict("state", live)]) is not None
    assert_equal(live, expected[2])


def test_a_damaged_one_is_read_from_the_next_place(first: Path, store: FarStore) -> None:
    expected = saved(first, [FAR])
    kept = first / "step-00000002" / "rank-00000.kept.pt"
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    live = blank(expected[2])
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        restored = checkpointer.restore([from_state_dict("state", live)])
    assert restored is not None
    assert restored.step == 2
    assert_equal(live, expected[2])


def test_it_is_fetched(first: Path, tmp_path: Path, store: FarStore) -> None:
    expected = saved(first, [FAR])
    assert commands.main(["fetch", FAR, str(tmp_path / "back")]) == 0
    (found,) = (tmp_path / "back").glob("step-*")
    assert_equal(ds.load(found)["state"], expected[2])
    assert {file.name for file in found.glob("rank-*")} == {"rank-00000.pt", "rank-00000.kept.pt"}


def test_a_bucket_is_sent_it_once(first: Path, store: FarStore) -> None:
    saved(first, [FAR])
    uploads = [name for request, name in store.asked if request == "upload"]
    assert len(uploads) == 4  # three of the rank's own containers
    assert uploads.count("rank-00000.kept.pt") == 1


@pytest.mark.parametrize("what", ["damaged", "refused"])
def test_a_directory_is_sent_it_again(
    what: str, first: Path, tmp_path: Path, store: FarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    expected = saved(first, [shared])
    kept = shared / "step-00000002" / "rank-00000.kept.pt"
    if what == "damaged":
        data = bytearray(kept.read_bytes())
        data[len(data) // 2] ^= 1
        with kept.open("r+b") as file:
            file.write(data)
        monkeypatch.setattr(carry, "_whole", set())  # a later process
    else:
        link = LocalStore.link

        def refused(self: LocalStore, source: Location, target: Location) -> bool:
            if target.is_relative_to(Location(shared)):
                raise StorageError(errno.EMLINK, "link", str(target))
            return link(self, source, target)

        monkeypatch.setattr(LocalStore, "link", refused)
    state = gone_on(first, shared, expected[2])
    newest = shared / "step-00000003"
    assert (newest / "rank-00000.kept.pt").stat().st_nlink == 1
    assert (first / "step-00000003" / "rank-00000.kept.pt").stat().st_nlink == 3
    assert list(own.open(Location(newest)).verify(lambda nbytes: None)) == []
    assert_equal(ds.load(newest)["state"], state)


def test_one_that_is_about_to_go_is_sent_again(first: Path, store: FarStore) -> None:
    expected = saved(first, [FAR])
    (folder,) = (name for name in store.names(Location.of(FAR)) if name.startswith("kept-"))
    store.create(Location.of(FAR) / f"{folder}.ended", b"ended\n")
    state = gone_on(first, FAR, expected[2])
    assert [name for request, name in store.asked if request == "upload"].count("rank-00000.kept.pt") == 2
    (newest,) = (one.path for one in tier_of(Location.of(FAR)).checkpoints() if one.step == 3)
    assert_equal(ds.load(newest.face)["state"], state)
    named = {one.folder for one in manifest.open(newest).containers}
    assert len(named) == 2
    assert folder not in named


@pytest.mark.parametrize("damage", ["gone", "cut short", "changed"])
def test_a_bucket_that_has_lost_it_is_told(damage: str, first: Path, tmp_path: Path, store: FarStore) -> None:
    expected = saved(first, [FAR])
    (path,) = (one.path for one in tier_of(Location.of(FAR)).checkpoints() if one.step == 2)
    kept, _ = manifest.files_of(path, manifest.open(path))[1]
    data = bytearray(store.read_all(kept))
    store.discard([kept])
    if damage != "gone":
        data[len(data) // 2] ^= 1
        store.create(kept, bytes(data[: -1 if damage == "cut short" else None]))
    with pytest.raises(ds.errors.DatastatesError, match=r"rank-00000\.kept\.pt"):
        ds.load(path.face)
    assert len(list(own.open(path).verify(lambda nbytes: None))) > 0
    live = blank(expected[2])
    with ds.Checkpointer(tmp_path / "empty", tiers=[FAR, first]) as checkpointer:
        restored = checkpointer.restore([from_state_dict("state", live)])
    assert restored is not None
    assert restored.step == 2
    assert_equal(live, expected[2])


def test_each_of_two_ranks_sends_its_own(first: Path, store: FarStore) -> None:
    """One of them makes another one later: a checkpoint names containers of two steps."""
    whole = torch.randn(2, 200_000)

    def rank(number: int) -> None:
        options: Options = {"rank": number, "world_size": 2, "incremental": True, "tiers": FAR}
        state = {"frozen": whole[number].clone(), "moves": torch.zeros(30_000)}
        with ds.Checkpointer(first, **options) as checkpointer:
            for step in range(6):
                state["moves"][:] = step
                if (number, step) == (1, 3):
                    state["frozen"] += 1
                checkpointer.snapshot([from_state_dict(f"state{number}", state)], step=step).wait_committed()
                checkpointer.wait_drained(60)

    as_two_ranks(rank)
    uploads = [name for request, name in store.asked if request == "upload"]
    assert [uploads.count(f"rank-0000{number}.kept.pt") for number in range(2)] == [1, 2]
    (newest,) = (one.path for one in tier_of(Location.of(FAR)).checkpoints() if one.step == 5)
    assert len({one.folder for one in manifest.open(newest).containers[2:]}) == 2
    live = {f"state{n}": {"frozen": torch.zeros(200_000), "moves": torch.zeros(30_000)} for n in range(2)}
    with ds.Checkpointer(FAR) as checkpointer:  # one rank restores what two have saved
        checkpointer.restore([from_state_dict(name, one) for name, one in live.items()])
    assert torch.equal(live["state0"]["frozen"], whole[0])
    assert torch.equal(live["state1"]["frozen"], whole[1] + 1)
    assert (live["state1"]["moves"] == 5).all()
