"""A framework's folders come to another place and back with every byte, each as a whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from far_store import FarStore
from framework_folders import FAR, contents, drain, drains, make, names

from datastates.cli.commands import main
from datastates.draining import folder
from datastates.draining.copies import Copies
from datastates.errors import StorageError
from datastates.files.settings import FileSettings
from datastates.kept import TierSettings
from datastates.storage import Location

Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Any:
        return main([str(a) for a in arguments]), *capsys.readouterr()

    return call


@pytest.mark.parametrize("place", [FAR, "archive/run"])
def test_every_byte_comes_back_on_a_fresh_disk(
    first: Path, store: FarStore, run: Run, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = make(first, 5)
    drain(path, place)
    before, times = contents(path), {p: os.stat(p).st_mtime_ns for p in path.rglob("*") if p.is_file()}
    shutil.rmtree(first)
    assert run("fetch", place, first)[0] == 0
    assert contents(path) == before
    assert {p: os.stat(p).st_mtime_ns for p in times if p.name != folder.RECORD} == {
        p: at for p, at in times.items() if p.name != folder.RECORD
    }
    store.asked.clear()
    drain(make(first, 10), place)  # what was fetched is not sent again
    assert names(place) == ["checkpoint-10", "checkpoint-5"]
    assert len(store.requests("upload")) == (4 if place == FAR else 0)
    assert run("fetch", place, first)[0] == 0  # both are there
    assert not [p for p in first.iterdir() if p.name.startswith(".")]


def test_a_folder_counts_once_its_list_is_there(first: Path, store: FarStore, run: Run, tmp_path: Path) -> None:
    drain(make(first, 5), FAR)
    seen: list[tuple[str, int]] = []

    def look(request: str, path: Location) -> None:
        if request in ("upload", "create"):
            store.before = lambda *_: None
            seen.append((request, len(Copies(Location.of(FAR)).every())))
            store.before = look

    store.before = look
    drain(make(first, 10), FAR)
    assert [request for request, _ in seen] == ["upload"] * 4 + ["create"]
    assert {n for _, n in seen} == {1}
    assert names() == ["checkpoint-10", "checkpoint-5"]


def test_a_dead_place_is_caught_up_with_and_told_of_once(
    first: Path, store: FarStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.dead = True
    made = drains(FAR)
    for step in (5, 10, 15):
        made.add(Location(make(first, step)))
    assert not made.wait(0.3)
    assert len([r for r in caplog.records if "wait to be brought" in r.message]) == 1
    store.dead = False
    assert made.wait(20)
    assert names() == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]
    made.close()


def test_close_does_not_wait_for_a_dead_place_and_a_later_run_goes_on(first: Path, store: FarStore, run: Run) -> None:
    store.dead = True
    drain(make(first, 5), FAR)
    store.dead = False
    drain(make(first, 10), FAR)
    assert names() == ["checkpoint-10", "checkpoint-5"]


def test_what_was_sent_is_not_sent_again(first: Path, store: FarStore) -> None:
    path = make(first, 5)

    def die(request: str, at: Location) -> None:
        store.dead = request == "upload" and len(store.requests("upload")) == 3

    store.before = die
    drain(path, FAR)
    store.dead, store.before = False, lambda *_: None
    store.asked.clear()
    made = drains(FAR)
    made.add(Location(make(first, 10)))
    assert made.wait(20)
    assert names() == ["checkpoint-10", "checkpoint-5"]
    assert len(store.requests("upload")) == 4 + 1
    made.close()


def test_a_folder_that_is_rotated_away_is_dropped(
    first: Path, store: FarStore, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(first, 5)

    def rotate(request: str, at: Location) -> None:
        if request == "upload" and path.exists():
            shutil.rmtree(path)

    store.before = rotate
    made = drains(FAR)
    made.add(Location(path))
    assert made.wait(20)
    made.add(Location(make(first, 10)))
    assert made.wait(20)
    assert names() == ["checkpoint-10"]
    made.close()
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


def test_half_a_folder_never_travels(first: Path, store: FarStore, run: Run) -> None:
    """A rotation that was killed leaves some of the files; a run that was killed, a folder without a record."""
    store.dead = True
    half, unfinished = make(first, 5), make(first, 7)
    drain(half, FAR)
    (half / "optimizer.pt").unlink()
    (unfinished / "trainer_state.json").unlink()
    store.dead = False
    drain(make(first, 10), FAR)
    assert names() == ["checkpoint-10"]
    assert run("drain", first, FAR)[0] == 0
    assert names() == ["checkpoint-10"]


@pytest.mark.parametrize("where", [40, 5000, -30, -3])
def test_a_flipped_bit_does_not_travel(
    first: Path, store: FarStore, where: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, file = make(first, 5), "optimizer.pt"
    at = os.stat(path / file).st_mtime_ns
    data = bytearray((path / file).read_bytes())
    data[where] ^= 1
    (path / file).write_bytes(data)
    os.utime(path / file, ns=(at, at))
    made = drains(FAR)
    made.add(Location(path))
    assert made.wait(20)
    made.add(Location(make(first, 10)))
    assert made.wait(20)
    made.close()
    assert names() == ["checkpoint-10"]
    assert [r.message for r in caplog.records if "is not brought to" in r.message and file in r.message]


def test_a_flipped_bit_in_the_place_is_found(first: Path, store: FarStore, run: Run, tmp_path: Path) -> None:
    drain(make(first, 5), FAR)
    (copy,) = Copies(Location.of(FAR)).every().values()
    path = Location.of(FAR) / copy.key / "model.bin"
    data = bytearray(store.read_all(path))
    data[100] ^= 1
    store.replace(path, bytes(data))
    done = run("fetch", FAR, tmp_path / "fresh")
    assert done[0] == 1
    assert "model.bin" in done[2]
    assert not any((tmp_path / "fresh").iterdir())


def test_a_damaged_list_is_not_passed_over(first: Path, store: FarStore, run: Run, tmp_path: Path) -> None:
    drain(make(first, 5), FAR)
    drain(make(first, 10), FAR)
    newest = max(Copies(Location.of(FAR)).every().values(), key=lambda one: one.number)
    path = Location.of(f"{FAR}/{newest.key}.json")
    data = bytearray(store.read_all(path))
    data[60] ^= 1
    store.replace(path, bytes(data))
    done = run("fetch", FAR, tmp_path / "fresh")
    assert (done[0], "is damaged" in done[2], (tmp_path / "fresh").exists()) == (1, True, False)
    assert run("fetch", FAR, tmp_path / "fresh", "--step", 5)[0] == 0
    assert [p.name for p in (tmp_path / "fresh").iterdir()] == ["checkpoint-5"]


def test_a_name_with_other_contents_replaces_the_old_copy(
    first: Path, store: FarStore, run: Run, tmp_path: Path
) -> None:
    """A run that was rolled back saves a step again: the newest is what was saved last, whatever its number."""
    for step in (5, 10, 15):
        drain(make(first, step), FAR)
    path = make(first, 10, salt=100)
    drain(path, FAR)
    assert names() == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]
    assert run("fetch", FAR, tmp_path / "fresh")[0] == 0
    assert contents(tmp_path / "fresh" / "checkpoint-10") == contents(path)
    assert not (tmp_path / "fresh" / "checkpoint-15").exists()
    assert len({at.split("/")[4] for at in map(str, store._objects) if at.startswith(f"{FAR}/checkpoint-10")}) == 2


def test_a_run_is_newer_than_all_before_whatever_its_clock_says(
    first: Path, store: FarStore, run: Run, tmp_path: Path
) -> None:
    drain(make(first, 20), FAR)
    shutil.rmtree(first)
    made = drains(FAR)
    for step in (5, 10):
        path = make(first, step)
        for file in path.rglob("*"):
            os.utime(file, (step, step))  # in 1970
        made.add(Location(path))
    made.close()
    assert run("fetch", FAR, tmp_path / "fresh")[0] == 0
    assert [p.name for p in (tmp_path / "fresh").iterdir()] == ["checkpoint-10"]


def test_each_place_keeps_what_it_is_to_keep(first: Path, store: FarStore) -> None:
    made = drains(TierSettings(FAR, keep_last=1, keep_every=10), "far://bucket/all")
    for step in (5, 10, 15, 20, 25):
        made.add(Location(make(first, step)))
        assert made.wait(20)
    made.close()
    assert names() == ["checkpoint-10", "checkpoint-20", "checkpoint-25"]
    assert len(names("far://bucket/all")) == 5
    copies = Copies(Location.of(FAR)).every()
    assert {name.split("/")[0].removesuffix(".json") for name in store.entries(Location.of(FAR), deep=True)} == {
        *copies
    }
    assert made.wait(0)


def test_what_no_place_can_be_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="no store is registered for far"):
        FileSettings.of({"tiers": FAR})
    with pytest.raises(ValueError, match="keep_best"):
        FileSettings.of({"tiers": [TierSettings("archive", keep_best=1)]})


def test_what_a_killed_process_sent_is_swept_a_day_later(first: Path, store: FarStore) -> None:
    drain(make(first, 1), FAR)
    path = make(first, 5)

    def deny(request: str, at: Location) -> None:
        if request == "create":
            raise StorageError(errno.EACCES, request, str(at))

    store.before = deny
    drain(path, FAR)
    store.before = lambda *_: None
    shutil.rmtree(path)
    drain(make(first, 10), FAR)
    debris = [n for n in store.names(Location.of(FAR)) if n.startswith("checkpoint-5")]
    assert len(debris) == 1
    store.age(2 * 86_400)
    drain(make(first, 15), FAR)
    assert [n for n in store.names(Location.of(FAR)) if n.startswith("checkpoint-5")] == [f"{debris[0]}.json"]
    assert names() == ["checkpoint-1", "checkpoint-10", "checkpoint-15"]
    store.age(8 * 86_400)
    drain(make(first, 20), FAR)
    assert not [n for n in store.names(Location.of(FAR)) if n.startswith("checkpoint-5")]


def test_behind_a_fence_another_name_is_taken(first: Path, store: FarStore, tmp_path: Path) -> None:
    path = make(first, 5)
    shutil.copytree(path, tmp_path / "kept" / path.name)
    drain(path, FAR)
    (copy,) = Copies(Location.of(FAR)).every().values()
    listed = Location.of(f"{FAR}/{copy.key}.json")
    store.replace(listed, b"no copy\n")
    drain(make(first, 10), FAR)
    assert names() == ["checkpoint-10", "checkpoint-5"]


def test_a_file_is_a_checkpoint_too(first: Path, store: FarStore, run: Run, tmp_path: Path) -> None:
    first.mkdir()
    made = drains(FAR)
    for step in (1, 2):
        torch.save({"step": step}, first / "last.ckpt")
        made.add(Location(first / "last.ckpt"))
        assert made.wait(20)
    made.close()
    (first / "torn.ckpt").write_bytes((first / "last.ckpt").read_bytes()[:-30])
    assert run("drain", first, FAR)[0] == 0
    assert names() == ["last.ckpt"]
    assert run("fetch", FAR, tmp_path / "fresh")[0] == 0
    assert torch.load(tmp_path / "fresh" / "last.ckpt")["step"] == 2
    assert [p.name for p in (tmp_path / "fresh").iterdir()] == ["last.ckpt"]


def test_the_command_sends_folders_and_names_the_newest(first: Path, store: FarStore, run: Run, tmp_path: Path) -> None:
    for name, files in (
        ("global_step5", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]),
        ("global_step10", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]),
    ):
        (first / name).mkdir(parents=True)
        for file in files:
            (first / name / file).write_text(name)
    (first / "latest").write_text("global_step5")
    assert run("drain", first, FAR)[0] == 0
    assert names() == ["global_step5"]  # DeepSpeed has not completed the other one
    (first / "latest").write_text("global_step10")
    assert run("drain", first / "global_step10", FAR)[0] == 0
    assert names() == ["global_step10", "global_step5"]
    assert "has them all" in run("drain", first, FAR)[1]
    assert run("fetch", FAR, tmp_path / "fresh")[0] == 0
    assert (tmp_path / "fresh" / "latest").read_text() == "global_step10"
    assert run("fetch", f"{FAR}/global_step5", tmp_path / "fresh")[0] == 0
    assert (tmp_path / "fresh" / "latest").read_text() == "global_step5"
    assert run("fetch", FAR, tmp_path / "fresh", "--step", 7)[0] == 2
    assert run("fetch", FAR, "far://bucket/other")[0] == 2


def test_fetch_replaces_nothing(first: Path, store: FarStore, run: Run) -> None:
    path = make(first, 5)
    drain(path, FAR)
    make(first, 5, salt=9)
    before = contents(path)
    done = run("fetch", FAR, first)
    assert (done[0], "move it away" in done[2]) == (1, True)
    assert contents(path) == before


def test_a_folder_waits_for_the_file_that_its_framework_writes_last(first: Path, store: FarStore) -> None:
    path = first / "iter_0000010"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x" * 100)
    (path / ".metadata").write_bytes(b"m")
    made, asked = drains(FAR), threading.Event()
    store.before = lambda *_: asked.set()
    made.add(Location(path))
    assert asked.wait(20)
    assert not made.wait(0.1)
    (path / "metadata.json").write_text("")  # it is being written
    assert not made.wait(0.1)
    assert names() == []
    (path / "metadata.json").write_text("{}")
    assert made.wait(20)
    assert names() == ["iter_0000010"]
    made.close()
