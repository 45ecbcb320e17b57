"""A directory of checkpoints: which of them stay, other writers, and what in it is left alone."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hold import held
from steps import OPTIONS, PRELUDE, array_of, assert_holds, fail_one, providers

import datastates as ds
from datastates.commit import manifest, newest, retention
from datastates.commit.directory_tier import DirectoryTier
from datastates.commit.pending import Pending
from datastates.commit.tier import Tier
from datastates.commit.tiers import tier_of
from datastates.errors import FencedError
from datastates.kept import Keep
from datastates.providers import HostTensorProvider
from datastates.storage import Folders, Location, folders_of

# --- retention


def test_retention_keeps_the_last_ones(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_last=2, **OPTIONS) as ckpt:
        for step in range(1, 7):
            ckpt.snapshot(providers(step), step=step)
    assert_holds(tmp_path, 5, 6)


def test_retention_keeps_the_multiples_beside_the_last_ones(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_last=2, keep_every=4, **OPTIONS) as ckpt:
        for step in range(11):
            ckpt.snapshot(providers(step), step=step)
    assert_holds(tmp_path, 0, 4, 8, 9, 10)


@pytest.mark.parametrize("late", [1, 3], ids=["of the past", "rolled back"])
def test_one_that_is_overtaken_is_older_than_what_overtook_it(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken = threading.Event()
    real = Pending.commit

    def commit(pending: Pending, made: manifest.Manifest, target: Callable[[], Path]) -> Path:
        if made.step == late:
            assert overtaken.wait(30)
        return real(pending, made, target)

    monkeypatch.setattr(Pending, "commit", commit)
    with ds.Checkpointer(tmp_path, keep_last=1, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(late), step=late)
        ckpt.snapshot(providers(2), step=2).wait_committed()
        overtaken.set()
    assert_holds(tmp_path, 2)


def test_retention_deletes_nothing_before_the_newer_one_is_committed(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_last=1, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        with held("sync"):
            second = ckpt.snapshot(providers(2), step=2)
            second.wait_captured()
            assert ckpt.steps() == [1]
        second.wait_committed()
    assert_holds(tmp_path, 2)


def test_retention_deletes_nothing_for_a_snapshot_that_fails(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_last=1, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        fail_one(ckpt, 2)
    assert_holds(tmp_path, 1)


def test_a_step_saved_twice_is_superseded_by_the_later_one(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=5).wait_committed()
        ckpt.snapshot(providers(2), step=5).wait_committed()
        assert ckpt.steps() == [5]
        assert np.array_equal(ds.load(tmp_path)["model"]["a"], array_of(2))
    assert len(list(tmp_path.iterdir())) == 1
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(3), step=5)
    assert np.array_equal(ds.load(tmp_path)["model"]["a"], array_of(3))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_step_saved_again_keeps_the_earlier_one_until_it_is_committed(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        with held("sync"):
            again = ckpt.snapshot(providers(1), step=1)
            again.wait_captured()
            assert_holds(tmp_path, 1)
        again.wait_committed()
        fail_one(ckpt, 1)
    assert_holds(tmp_path, 1)


def test_a_step_saved_twice_at_once_is_superseded_by_the_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, overtaken = threading.Event(), threading.Event()
    real = Pending.commit

    def commit(pending: Pending, made: manifest.Manifest, target: Callable[[], Path]) -> Path:
        if not begun.is_set():
            begun.set()
            assert overtaken.wait(30)
        return real(pending, made, target)

    monkeypatch.setattr(Pending, "commit", commit)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=5)
        assert begun.wait(30)
        ckpt.snapshot(providers(2), step=5).wait_committed()
        overtaken.set()
        ckpt.wait()
        assert ckpt.failures == 0
    assert np.array_equal(ds.load(tmp_path)["model"]["a"], array_of(2))
    assert tier_of(tmp_path).debris() == []


# --- two processes, one directory


def test_a_second_checkpointer_leaves_what_a_living_one_writes(tmp_path: Path, run: Callable[..., Any]) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt, held("sync"):
        snapshot = ckpt.snapshot(providers(1), step=1)
        snapshot.wait_captured()
        partial = [e for e in tmp_path.iterdir() if ".partial-" in e.name]
        assert len(partial) == 1
        assert tier_of(tmp_path).debris() == []
        ended = run("-c", f"{PRELUDE}\nds.Checkpointer(root, **OPTIONS).close()", tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert partial[0].exists()
    assert_holds(tmp_path, 1)


def test_of_two_processes_that_write_into_one_directory_the_one_that_opened_later_goes_on(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    script = f"""
{PRELUDE}
with ds.Checkpointer(root, **OPTIONS) as ckpt:
    for step in range(100, 110):
        ckpt.snapshot(providers(step), step=step)
"""
    ended: list[Any] = []
    other = threading.Thread(target=lambda: ended.append(run("-c", script, tmp_path)))
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(0), step=0).wait_committed()
        with held("sync"):
            fenced = ckpt.snapshot(providers(1), step=1)
            other.start()
            while other.is_alive() and not list(tmp_path.glob("step-000001*")):
                time.sleep(0.001)
        with pytest.raises(FencedError):
            ckpt.snapshot(providers(2), step=2).wait_committed()
        with pytest.raises(FencedError):
            fenced.wait_committed()
        with pytest.raises(FencedError):  # whatever on_error says
            ckpt.snapshot(providers(3), step=3)
        other.join()
    assert ended[0].returncode == 0, ended[0].stderr
    assert_holds(tmp_path, 0, *range(100, 110))


def test_files_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    mine = ["notes.txt", "tensorboard", "step-1", "model.partial-0123abcd", "latest"]
    (tmp_path / mine[0]).write_text("mine")
    for name in mine[1:4]:
        (tmp_path / name).mkdir()
    os.symlink(tmp_path / "tensorboard", tmp_path / mine[4])
    with ds.Checkpointer(tmp_path, keep_last=1, **OPTIONS) as ckpt:
        for step in (1, 2):
            ckpt.snapshot(providers(step), step=step)
    assert sorted(e.name for e in tmp_path.iterdir()) == sorted([*mine, "step-00000002"])


def test_every_step_committed_stays_committed_without_retention(tmp_path: Path) -> None:
    steps = list(range(150))
    with ds.Checkpointer(tmp_path, max_in_flight=4, **OPTIONS) as ckpt:
        for step in steps:
            ckpt.snapshot([HostTensorProvider("model", {"a": np.full(10, step)})], step=step)
    assert list(newest.committed(tier_of(tmp_path))) == steps


def test_a_commit_while_superseded_ones_are_looked_for_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    ds.snapshot(providers(1), root / "step-00000001", step=1, **OPTIONS).wait_committed()
    ds.snapshot(providers(1), root / "step-00000001.r1", step=1, **OPTIONS).wait_committed()
    shutil.copytree(root / "step-00000001", tmp_path / "spare")
    kind = type(folders_of(Location(root)))
    real = kind.numbers
    listings = 0

    def numbers(store: Folders, folder: Location) -> dict[str, int]:
        nonlocal listings
        found = real(store, folder)
        listings += 1
        shutil.copytree(tmp_path / "spare", root / f"step-{10 + listings:08d}")
        return found

    monkeypatch.setattr(kind, "numbers", numbers)
    assert retention.outdated(tier_of(root), Keep()) == [root / "step-00000001"]
    assert listings > 0


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "step-00000100"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"theirs")
    with ds.Checkpointer(tmp_path, keep_last=1, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(100), step=100)
    assert (foreign / "model.safetensors").read_bytes() == b"theirs"
    assert newest.committed(tier_of(tmp_path))[100].name == "step-00000100.r1"


def test_the_gate_does_not_wait_for_a_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deleting, go_on = threading.Event(), threading.Event()
    real = DirectoryTier.remove

    def slow(tier: Tier, path: Location) -> bool:
        deleting.set()
        assert go_on.wait(30)
        return real(tier, path)

    monkeypatch.setattr(DirectoryTier, "remove", slow)
    with ds.Checkpointer(tmp_path, keep_last=1, **OPTIONS) as ckpt:
        for step in (1, 2):
            ckpt.snapshot(providers(step), step=step)
        assert deleting.wait(30)
        ckpt.gate()
        go_on.set()
    assert list(newest.committed(tier_of(tmp_path))) == [2]


# --- the best


SERIES = [5.0, 3.0, float("nan"), 4.0, 3.0, None, float("-inf"), 6.0]
"""The metrics of the steps from 0 on."""


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_best": 2}, [1, 4, 7]),
        ({"keep_best": 3}, [1, 3, 4, 7]),
        ({"keep_best": 1, "keep_last": 3}, [4, 5, 6, 7]),
        ({"keep_best": 2, "best_mode": "max"}, [0, 7]),
        ({"keep_best": 1, "keep_every": 3}, [0, 3, 4, 6, 7]),
    ],
    ids=str,
)
def test_retention_keeps_the_best(options: dict[str, Any], kept: list[int], tmp_path: Path) -> None:
    for begin in (0, 4):  # a new run goes by the metrics of the one before
        with ds.Checkpointer(tmp_path, **options, **OPTIONS) as ckpt:
            for step, metric in list(enumerate(SERIES))[begin : begin + 4]:
                ckpt.snapshot(providers(step), step=step, metric=metric)
    assert_holds(tmp_path, *kept)


def test_a_damaged_one_is_not_the_best(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_best=1, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1, metric=1.0).wait_committed()
        ckpt.snapshot(providers(2), step=2, metric=2.0).wait_committed()
        os.truncate(tmp_path / "step-00000001" / "rank-00000.pt", 100)
        for step in (3, 4):
            ckpt.snapshot(providers(step), step=step, metric=3.0).wait_committed()
    assert list(newest.committed(tier_of(tmp_path))) == [1, 2, 4]


# --- damaged ones


def test_damaged_checkpoints_do_not_count(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_last=2, **OPTIONS) as ckpt:
        for step in (1, 2):
            ckpt.snapshot(providers(step), step=step).wait_committed()
        for step in (3, 4, 5):
            ckpt.snapshot(providers(step), step=step).wait_committed()
            os.truncate(tmp_path / f"step-{step:08d}" / "rank-00000.pt", 100)
        assert sorted(newest.committed(tier_of(tmp_path))) == [2, 3, 4, 5]
        restored = ckpt.restore(providers(0), fallback=True)
        assert restored is not None
        assert restored.step == 2
        for step in (6, 7):
            ckpt.snapshot(providers(step), step=step).wait_committed()
    assert_holds(tmp_path, 6, 7)


def test_the_only_whole_one_stays_whatever_is_damaged(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_last=1, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        for damage in (
            lambda path: (path / "manifest.json").write_bytes(b"{}"),
            lambda path: (path / "rank-00000.pt").unlink(),
        ):
            shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
            damage(tmp_path / "step-00000009")
            assert retention.outdated(tier_of(tmp_path), Keep(last=1)) == []
            shutil.rmtree(tmp_path / "step-00000009")


def test_a_damaged_revision_supersedes_nothing(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        second = ckpt.snapshot(providers(1), step=1)
        second.wait_committed()
        shutil.copytree(second.path, tmp_path / "step-00000001.r5")
        os.truncate(tmp_path / "step-00000001.r5" / "rank-00000.pt", 100)
    assert retention.outdated(tier_of(tmp_path), Keep()) == []
    shutil.rmtree(tmp_path / "step-00000001.r5")


@pytest.mark.parametrize("revision", [999_999_999, 10**18 - 1, 10**40])
def test_the_revision_after_a_large_one_is_found(revision: int, tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(3), step=3).wait_committed()
        (tmp_path / "step-00000003").rename(tmp_path / f"step-00000003.r{revision}")
        ckpt.snapshot(providers(3), step=3).wait_committed()
        assert newest.committed(tier_of(tmp_path))[3].name == f"step-00000003.r{revision + 1}"
        assert ckpt.latest() == 3
