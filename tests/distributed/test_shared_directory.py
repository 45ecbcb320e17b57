"""Several ranks save into one directory: debris of other runs, retention, and several snapshots at once."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import short

from datastates.cli import commands
from datastates.commit import fence, manifest, newest
from datastates.commit.pending import Pending
from datastates.commit.tiers import tier_of
from datastates.storage import store_of

HERE = Path(__file__).parent
LOOP = HERE / "rank_loop.py"


def options(**changed: object) -> str:
    return json.dumps(changed)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in checkpoints(root))


def checkpoints(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name != fence.FOLDER]


def is_whole(path: Path) -> bool:
    return commands.main(["verify", str(path)]) == 0


# --- debris


@pytest.mark.by_hand
def test_debris_of_every_kind(ranks: Any, reports: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ranks(2, LOOP, root, 1)
    dead = ["step-00000002.partial-0123abcd", "step-00000002.partial-89abcdef", "step-00000001.r1.partial-00000000"]
    for name, files in zip(dead, [["rank-00001.pt", ".lock"], ["rank-00000.pt", "manifest.json"], []], strict=True):
        (root / name).mkdir()
        for file in files:
            (root / name / file).write_bytes(b"left over")
        for one in (*(root / name).iterdir(), root / name):
            os.utime(one, (0, 0))  # it has stood still for long
    ours = ["step-00000009", "step-00000002.partial-0123ABCD", "notes.partial-0123abcd"]
    for name in ours:
        (root / name).mkdir()
        (root / name / "file").write_bytes(b"not of any run")
    (root / "step-00000008.partial-01234567").symlink_to(root / "step-00000009")
    living = Pending(root / "step-00000005", "0a1b2c3d").begin()
    living.file("rank-00003.pt").write_bytes(b"being written")
    # what the rendezvous of another run of three ranks left; its session file is cut short
    for folder in ("0123456789abcdef", "0123456789abcdef/joined"):
        (root / ".ranks" / folder).mkdir(parents=True)
    (root / ".ranks" / "hello-1-3-0123456789abcdef").touch()
    (root / ".ranks" / "session-0123456789abcdef").write_text(
        '{"run": "0123456789abcdef", "seen": ["1-0123456789abcdef"], "mem'
    )
    told = reports(ranks(3, LOOP, root, 2, 3))
    assert [rank["3"]["committed"] for rank in told] == ["step-00000003"] * 3
    checkpoints = [f"step-{step:08d}" for step in (1, 2, 3)]
    left = [*checkpoints, *ours, "step-00000008.partial-01234567", living.directory.name]
    assert names(root) == sorted(left)
    assert names(living.directory) == [".lock", "rank-00003.pt"]
    assert all(is_whole(root / name) for name in checkpoints)
    living.abandon()
    assert not living.directory.exists()


def test_the_last_rank_to_give_up_takes_the_directory_away(tmp_path: Path) -> None:
    pending = [Pending(tmp_path / "step-00000001", "0a1b2c3d").begin() for _ in range(3)]
    for rank, one in enumerate(pending):
        one.file(f"rank-{rank:05d}.pt").touch()
    pending[1].abandon()
    assert names(pending[0].directory) == [".lock", "rank-00000.pt", "rank-00002.pt"]
    pending[0].abandon()
    pending[2].files[0].unlink()  # it has written nothing yet, but the directory is still its own
    Pending(tmp_path / "step-00000001", "0a1b2c3d").begin().close()
    assert names(tmp_path) == ["step-00000001.partial-0a1b2c3d"]
    pending[2].abandon()
    assert names(tmp_path) == []


def test_a_rank_that_has_not_begun_to_write_keeps_its_directory(tmp_path: Path) -> None:
    first, second = (Pending(tmp_path / "step-00000001", "0a1b2c3d").begin() for _ in range(2))
    first.abandon()
    second.file("rank-00001.pt").touch()
    second.abandon()
    assert names(tmp_path) == []


def test_closing_twice_lets_no_other_lock_go(tmp_path: Path) -> None:
    first = Pending(tmp_path / "step-00000001").begin()
    first.close()
    # it reuses the number of the closed descriptor
    second = Pending(tmp_path / "step-00000002").begin()
    first.close()
    assert second.directory not in tier_of(tmp_path).debris()
    second.close()
    assert second.directory in tier_of(tmp_path).debris()


def test_several_make_a_directory_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    paths = [tmp_path / str(i) / "run" for i in range(100)]
    together = threading.Barrier(6)

    def make() -> None:
        for path in paths:
            together.wait()
            try:
                store_of(path).make_folder(path)
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(path.is_dir() for path in paths)


# --- retention


@pytest.mark.by_hand
def test_the_coordinator_alone_deletes(ranks: Any, reports: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    words = [1, 2, 3, "4/store.remove=kill", 5, 5, 6, 7]
    told = reports(ranks(3, LOOP, root, *words, CONFUSED="1", OPTIONS=options(keep_last=2, keep_every=3)))
    assert {rank["7"]["committed"] for rank in told} == {"step-00000007"}
    assert names(root) == ["step-00000003", "step-00000006", "step-00000007"]
    assert all(is_whole(path) for path in checkpoints(root))


@pytest.mark.by_hand
def test_a_coordinator_killed_while_it_deletes(ranks: Any, reports: Any, tmp_path: Path) -> None:
    """The old checkpoint no longer counts, though its files still exist. All ranks know of the new one."""
    root = tmp_path / "run"
    variables = {"CONFUSED": "0", "OPTIONS": options(keep_last=1, rank_timeout=1.5)}
    told = reports(ranks(3, LOOP, root, 1, "2/store.remove=kill", may_fail=[0], **variables))
    assert [rank["2/store.remove=kill"]["committed"] for rank in told[1:]] == ["step-00000002"] * 2
    assert list(newest.committed(tier_of(root))) == [2]
    (left,) = tier_of(root).debris()
    assert names(left) == ["catalog.bin", "manifest.json", "rank-00000.pt", "rank-00001.pt", "rank-00002.pt"]
    ranks(2, LOOP, root, 3, OPTIONS=options(keep_last=1))
    assert names(root) == ["step-00000003"]


@pytest.mark.by_hand
def test_what_another_job_reads_is_deleted_later(ranks: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ranks(2, LOOP, root, 1)
    with tier_of(root).protect(root / "step-00000001"):
        ranks(2, LOOP, root, 2, 3, OPTIONS=options(keep_last=1))
        assert names(root) == ["step-00000001", "step-00000003"]
        assert is_whole(root / "step-00000001")
    ranks(2, LOOP, root, 4, OPTIONS=options(keep_last=1))
    assert names(root) == ["step-00000004"]


# --- several snapshots at once


@pytest.mark.long
def test_the_later_of_one_step_supersedes(ranks: Any, prelude: str, reports: Any, tmp_path: Path) -> None:
    script = f"""{prelude}
with ds.Checkpointer(directory, **OPTIONS) as ckpt:
    for step in range(25):
        taken = []
        for revision in (1, 2):
            taken.append(ckpt.snapshot([state.fill(revision)], step=step))
            ckpt.gate()
        tell(str(step), lambda: {{"names": [snap.wait_committed() or snap.path.name for snap in taken]}})
"""
    told = reports(ranks(2, script, tmp_path / "run"))
    for step in range(25):
        name = f"step-{step:08d}"
        assert [rank[str(step)]["names"] for rank in told] == [[name, f"{name}.r1"]] * 2
    # the earlier one was deleted as soon as the later one was committed
    assert names(tmp_path / "run") == [f"step-{step:08d}.r1" for step in range(25)]


@pytest.mark.by_hand
def test_a_rank_that_refuses(ranks: Any, prelude: str, reports: Any, tmp_path: Path) -> None:
    script = f"""{prelude}
import contextlib
OPTIONS |= {{"max_in_flight": 1, "when_busy": "refuse" if RANK == 1 else "wait"}}
with ds.Checkpointer(directory, **OPTIONS) as ckpt:
    with held("sync") if RANK == 1 else contextlib.nullcontext():
        first = ckpt.snapshot([state.fill(1)], step=1)
        ckpt.gate()
        tell("2", lambda: ckpt.snapshot([state.fill(2)], step=2).wait_committed())
    first.wait_committed()
    tell("3", lambda: ckpt.snapshot([state.fill(3)], step=3).wait_committed())
"""
    told = reports(ranks(3, script, tmp_path / "run"))
    refused = "1 snapshots are in flight, as many as max_in_flight allows"
    assert [rank["2"]["error"] for rank in told] == ["CommitError", "SnapshotRefusedError", "CommitError"]
    assert told[1]["2"]["text"] == refused
    assert told[0]["2"]["text"] == told[2]["2"]["text"] == f"rank 1: SnapshotRefusedError: {refused}"
    assert names(tmp_path / "run") == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("failure", short.first(["sync=fail:28", "shards"]))
def test_a_failure_is_raised_once_by_each_rank(
    failure: str, ranks: Any, prelude: str, reports: Any, tmp_path: Path
) -> None:
    """The calls that raise it may differ between ranks. A snapshot that one rank did not take fails on the others.

    That failure is not raised again.
    """
    script = f"""{prelude}
OPTIONS |= {{"on_error": "raise"}}
ckpt = ds.Checkpointer(directory, **OPTIONS)
for step in range(14):
    providers = [state.fill(step)]
    if step == 2 and RANK == 1:
        arm_faults({failure!r}) if "=" in {failure!r} else providers.append(Broken({failure!r}))
    tell(str(step), lambda: (ckpt.snapshot(providers, step=step), ckpt.gate()))
    time.sleep(0.05 if step % 2 == RANK else 0)
tell("close", ckpt.close)
"""
    told = reports(ranks(2, script, tmp_path / "run"))
    for rank in told:
        raised = [said["text"] for said in rank.values() if "error" in said]
        assert len(raised) == 1
        assert "No space left on device" in raised[0] or "no shards today" in raised[0]
    committed = list(newest.committed(tier_of(tmp_path / "run")))
    assert committed[:2] == [0, 1]
    assert committed[-7:] == list(range(7, 14))


@pytest.mark.by_hand
def test_a_coordinator_that_takes_too_long_gives_up(ranks: Any, prelude: str, reports: Any, tmp_path: Path) -> None:
    """It must not commit a snapshot that the others have stopped waiting for."""
    script = f"""{prelude}
from datastates.commit import ballot

write_catalog = ballot._write_catalog
ballot._write_catalog = lambda *args: (time.sleep(1.7 if args[0][0].step == 2 else 0), write_catalog(*args))[1]
with ds.Checkpointer(directory, **OPTIONS, rank_timeout=2) as ckpt:
    for step in (1, 2, 3):
        tell(str(step), lambda: ckpt.snapshot([state.fill(step)], step=step).wait_committed())
"""
    for rank in reports(ranks(2, script, tmp_path / "run")):
        assert rank["2"]["error"] == "CommitError"
        assert re.fullmatch(r"rank 0 needed \d+\.\d+ s to commit, and is given 2 s", rank["2"]["text"])
    assert names(tmp_path / "run") == ["step-00000001", "step-00000003"]


@pytest.mark.long
def test_a_rank_that_does_not_hear_the_outcome_takes_nothing_back(ranks: Any, reports: Any, tmp_path: Path) -> None:
    """Its vote stands, so that its file may already be part of a checkpoint."""
    told = reports(ranks(3, LOOP, tmp_path / "run", 1, "2/barrier.wait=fail:5", 3, CONFUSED="1"))
    said = [rank["2/barrier.wait=fail:5"] for rank in told]
    assert said[0]["committed"] == said[2]["committed"] == "step-00000002"
    assert "Input/output error" in said[1].get("text", "") or said[1]["committed"] == "step-00000002"
    assert names(tmp_path / "run") == [f"step-{step:08d}" for step in (1, 2, 3)]
    assert all(is_whole(path) for path in checkpoints(tmp_path / "run"))


@pytest.mark.by_hand
def test_a_coordinator_that_cannot_tell_has_committed(ranks: Any, reports: Any, tmp_path: Path) -> None:
    variables = {"CONFUSED": "0", "OPTIONS": options(rank_timeout=1.5)}
    told = reports(ranks(2, LOOP, tmp_path / "run", 1, "2/barrier.publish=fail:28", **variables))
    assert [rank["2/barrier.publish=fail:28"]["committed"] for rank in told] == ["step-00000002"] * 2
    assert names(tmp_path / "run") == ["step-00000001", "step-00000002"]


# --- one-shot snapshots


@pytest.mark.long
def test_one_shot_snapshots_by_several_ranks(ranks: Any, prelude: str, reports: Any, tmp_path: Path) -> None:
    script = f"""{prelude}
class Eager(Broken):
    def shards(self):
        return [object_shard()]


where = {{"rank": RANK, "world_size": RANKS, "rank_timeout": 20}}


def shot(name, step, *more):
    return ds.snapshot([state.fill(step), *(more if RANK == 1 else ())], directory / name, step=step, **where)


def twice():
    first = shot("first", 1)
    first.wait_captured()
    second = shot("second", 2)  # while the first may still be under way
    first.wait_committed()
    second.wait_committed()


with ds.Checkpointer(directory, **OPTIONS) as ckpt:
    tell("twice", twice)
    tell("there", lambda: shot("first", 3).wait_committed())
    tell("serialize", lambda: shot("lazy", 4, Broken("serialize")).wait_committed())
    tell("eager", lambda: shot("eager", 4, Eager("serialize")).wait_committed())
    tell("shards", lambda: shot("shards", 4, Broken("shards")).wait_committed())
    tell("after", lambda: shot("after", 5).wait_committed())
    tell("beside", lambda: ckpt.snapshot([state], step=6).wait_committed())
"""
    root = tmp_path / "run"
    told = reports(ranks(3, script, root))
    for rank, said in enumerate(told):
        assert said["there"]["error"] == "CommitError"
        assert said["there"]["text"].startswith(f"FileExistsError: {root}/first exists")
        for word in ("serialize", "eager", "shards"):
            text = "no shards today" if word == "shards" else "cannot be serialized"
            assert said[word]["text"] == (text if rank == 1 else f"rank 1: LookupError: {text}")
            assert said[word]["seconds"] < 15
        for word in ("twice", "after", "beside"):
            assert "error" not in said[word]
    assert names(root) == ["after", "first", "second", "step-00000006"]
    assert [manifest.open(root / name).step for name in names(root)] == [5, 1, 2, 6]
    assert all(is_whole(path) for path in checkpoints(root))
