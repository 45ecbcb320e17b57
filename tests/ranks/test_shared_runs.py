"""Which processes belong to a run of ranks that meet in a shared directory."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from voting import ALL, SECONDS, SIZE, agree, joined, over_directory, together

from datastates.errors import DatastatesError, RanksMissingError, SettingsError, StorageError, UnreachableError
from datastates.ranks import join
from datastates.ranks.board_world import BoardWorld
from datastates.ranks.join import FOLDER
from datastates.ranks.world import World, world_of


def session_of(path: Path) -> dict[str, Any]:
    (session,) = (path / FOLDER).glob("session-*")
    told: dict[str, Any] = json.loads(session.read_text())
    return told


def debris_of_a_killed_run(path: Path, *, until: str) -> None:
    """Leave the files of a run whose ranks were all killed while they joined, or after they had agreed."""
    root = path / FOLDER
    run = "0123456789abcdef"
    processes = [f"{rank}-{rank:016x}" for rank in range(1, SIZE)]
    for process in processes if until == "joins" else []:
        rank, _, nonce = process.partition("-")
        (root / f"hello-{rank}-{SIZE}-{nonce}").parent.mkdir(exist_ok=True)
        (root / f"hello-{rank}-{SIZE}-{nonce}").touch()
    (root / run / "joined").mkdir(parents=True)
    for process in processes:
        (root / run / "joined" / process).touch()
    told = {"run": run, "seen": processes, "members": processes, "missing": None, "failure": ""}
    if until == "joins":
        told["members"] = None
    (root / f"session-{run}").write_text(json.dumps(told))
    (root / f".session-{run}.{'ab' * 4}").write_text("cut sho")
    (root / "hello-7-9-0123456789abcdef").touch()
    for box in ("name.votes", "name.answer"):
        (root / run / box).mkdir()
        (root / run / box / "0").write_bytes(b"dstale")


@pytest.mark.parametrize("until", ["joins", "agreed"])
@pytest.mark.parametrize("late", [0, 1, 3, None])
def test_files_of_a_killed_run_do_not_count(tmp_path: Path, until: str, late: int | None) -> None:
    debris_of_a_killed_run(tmp_path, until=until)

    def begin(rank: int) -> World:
        time.sleep(0.2 if rank == late else 0)
        return world_of(rank, SIZE, tmp_path, SECONDS)

    worlds = together(*(lambda r=r: begin(r) for r in range(SIZE)))
    assert agree(worlds) == [ALL] * SIZE
    run = session_of(tmp_path)["run"]
    assert {p.name for p in (tmp_path / FOLDER).iterdir()} == {f"session-{run}", run}
    for world in worlds:
        world.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"run": 3, "seen": []}', b'{"run": "../x", "seen": []}']
)
def test_a_session_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"session-{'0' * 16}").write_bytes(content)
    worlds = over_directory(tmp_path)
    assert agree(worlds) == [ALL] * SIZE
    for world in worlds:
        world.close()


def test_a_rank_killed_while_joining_may_start_again(tmp_path: Path) -> None:
    """Rank 2 has said hello and answered, is killed, and starts again before the last rank comes."""
    pool = ThreadPoolExecutor(SIZE)
    root = tmp_path / FOLDER
    root.mkdir()
    first = [pool.submit(world_of, rank, SIZE, tmp_path, SECONDS) for rank in (0, 1)]
    for rank in (2, 3):
        (root / f"hello-{rank}-{SIZE}-{rank:016x}").touch()
    while not list(root.glob("session-*")):
        time.sleep(0.01)
    (root / session_of(tmp_path)["run"] / "joined" / f"2-{2:016x}").touch()  # rank 3 is killed before it answers
    time.sleep(0.1)
    rest = [pool.submit(world_of, 2, SIZE, tmp_path, SECONDS)]
    while len(list(root.glob("hello-2-*"))) < 2:
        time.sleep(0.001)
    rest.append(pool.submit(world_of, 3, SIZE, tmp_path, SECONDS))
    worlds = [each.result() for each in first + rest]
    assert agree(worlds) == [ALL] * SIZE
    for world in worlds:
        world.close()
    pool.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_runs_follow_each_other_in_one_directory(tmp_path: Path) -> None:
    def several(rank: int) -> list[bytes]:
        outcomes = []
        for _ in range(5):
            world = world_of(rank, SIZE, tmp_path, SECONDS)
            outcomes.append(world.agree("name", f"<{rank}>".encode(), joined))
            world.close()
        return outcomes

    assert together(*(lambda r=r: several(r) for r in range(SIZE))) == [[ALL] * 5] * SIZE
    assert list(tmp_path.iterdir()) == []


def test_a_run_may_end_while_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run deletes only its own files, however long that takes."""

    remove = join.remove

    def late(path: Path) -> None:
        time.sleep(0.1)
        remove(path)

    monkeypatch.setattr(join, "remove", late)
    worlds = over_directory(tmp_path)
    ending = threading.Thread(target=worlds[0].close)
    ending.start()
    later = over_directory(tmp_path)
    assert agree(later) == [ALL] * SIZE
    ending.join()
    for world in worlds[1:] + later:
        world.close()
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    debris_of_a_killed_run(tmp_path, until="joins")
    outcomes = together(*(lambda r=r: world_of(r, SIZE, tmp_path, SECONDS if r else 1) for r in (0, 1)))
    assert [type(o) for o in outcomes] == [RanksMissingError] * 2
    assert [o.ranks for o in outcomes] == [(2, 3)] * 2
    assert {str(o) for o in outcomes} == {f"{tmp_path / FOLDER}: ranks 2-3 of 4 did not come within 0.8 s"}
    (alone,) = together(lambda: world_of(1, SIZE, tmp_path, 0.2))
    assert alone.ranks == (0,)
    worlds = over_directory(tmp_path)
    assert agree(worlds) == [ALL] * SIZE
    for world in worlds:
        world.close()


def test_two_processes_of_one_rank_are_refused(tmp_path: Path) -> None:
    def begin(rank: int) -> World:
        while rank == 3 and len(list((tmp_path / FOLDER).glob("hello-1-*"))) < 2:
            time.sleep(0.001)  # so that both are seen before the run is complete
        return world_of(rank, SIZE, tmp_path, SECONDS)

    outcomes = together(*(lambda r=r: begin(r) for r in (0, 1, 1, 2, 3)))
    (refused,) = (o for o in outcomes[1:3] if isinstance(o, DatastatesError))
    assert isinstance(refused, SettingsError)
    assert str(refused) == f"rank: another process in {tmp_path / FOLDER} says that it is rank 1, too"
    worlds = [o for o in outcomes if isinstance(o, BoardWorld)]
    assert agree(worlds) == [ALL] * SIZE
    for world in worlds:
        world.close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        world_of(0, 2, tmp_path / "file", 1)


def test_a_run_whose_folder_is_gone_is_told_so(tmp_path: Path) -> None:
    worlds = over_directory(tmp_path)
    worlds[0].close()
    with pytest.raises(UnreachableError, match="is gone: rank 0 has closed this run"):
        worlds[1].agree("name", b"", joined)
    for world in worlds[1:]:
        world.close()
