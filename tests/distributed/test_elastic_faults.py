"""Restores of several ranks from damaged, missing or unfitting checkpoints: all ranks fail, and tell why."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import short
from elastic_state import SHAPES, SMALL, Rank, restore, save
from split_state import Split

import datastates as ds
from datastates.commit import manifest
from datastates.commit.directory_tier import DirectoryTier
from datastates.commit.tier import Tier
from datastates.commit.tiers import tier_of
from datastates.errors import (
    CheckpointNotFoundError,
    CommitError,
    CorruptError,
    FormatError,
    RestoreError,
    StorageError,
)
from datastates.reading.stored import Stored
from datastates.restoring.meeting import Meeting
from datastates.state.provider import Saved
from datastates.state.shards import Shard
from datastates.storage import Location

LOOP = Path(__file__).with_name("rank_loop.py")


def untouched(states: Sequence[Rank]) -> bool:
    """Whether the states are as they were made."""
    zero = all(not a.any() for state in states for a in state.model.arrays.values())
    return zero and all(state.loop["rank"] == state.own["rank"] == -1 for state in states)


def restore_into(threads: Any, path: Path, states: Sequence[Rank], **options: Any) -> list[Any]:
    """Restore on as many ranks as there are states; returns for each rank the result, or the error."""
    for state in states:
        state.loop["rank"] = state.own["rank"] = -1
    options = {**SMALL, **options}
    return threads(len(states), lambda rank: ds.restore(states[rank].providers, path, **options))  # type: ignore[no-any-return]


def refused(threads: Any, path: Path, m: int = 2, layout: str = "rows", **options: Any) -> list[Any]:
    """Restore, and check that all ranks fail and change nothing; returns their errors."""
    states = [Rank(layout, rank, m) for rank in range(m)]
    errors = restore_into(threads, path, states, **options)
    assert all(isinstance(error, Exception) for error in errors), errors
    assert untouched(states)
    return errors


# --- files


def test_a_missing_container_loses_what_it_held_and_no_more(threads: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(threads, path, "rows", 3)
    (path / "rank-00001.pt").unlink()
    first, second = refused(threads, path)
    # the missing rank had 32 of 96 rows of 40, and each rank now wants half of them; it had 3 of the 7 of "odd"
    assert "'model/w' (640 of 1920 elements)" in str(first)
    assert "'model/odd' (15 of 60 elements)" in str(first)
    assert "as rank-00001.pt is missing" in str(first)
    assert "model/w" in first.missing
    assert "'model/w' (640 of 1920 elements)" in str(second)
    assert all(isinstance(error, RestoreError) for error in (first, second))

    states = [Rank("rows", rank, 3) for rank in range(3)]
    outcomes = restore_into(threads, path, states, strict=False)
    for rank in (0, 2):
        assert outcomes[rank].missing_keys == []
        assert states[rank].model.wrong(3) == []
        assert states[rank].loop == states[rank].own == {"rank": rank}
    held = [f"model/{key}" for key, array in states[1].model.arrays.items() if array.size and key != "scalar"]
    assert sorted(outcomes[1].missing_keys) == sorted([*held, "loop", "own"])
    assert not states[1].model.arrays["w"].any()
    assert states[1].own == {"rank": -1}
    assert states[1].loop == {"rank": 0}  # that of the lowest rank whose container exists


def test_ranks_that_miss_nothing_hear_which_file_another_misses(threads: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(threads, path, "rows", 3)
    (path / "rank-00001.pt").unlink()
    errors = refused(threads, path, 3)
    assert [bool(error.missing) for error in errors] == [False, True, False]
    assert [error.lost for error in errors] == [[str(path / "rank-00001.pt")]] * 3


def test_a_missing_container_that_nobody_needs_is_not_missed(threads: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(threads, path, "rows", 2, shapes={"w": (1, 40)})
    (path / "rank-00001.pt").unlink()  # it had no row, and its own object is not asked for
    states = [Rank("whole", 0, 1, {"w": (1, 40)})]
    assert [restored.step for restored in restore_into(threads, path, states)] == [3]


def test_lost_parts_are_not_verified_but_named(threads: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(threads, path, "rows", 2, shapes={"w": (8, 4), "v": (9, 4)})
    (path / "rank-00001.pt").unlink()
    states = [Rank("rows", rank, 2, {"w": (8, 4), "v": (9, 4)}) for rank in range(2)]
    outcomes = restore_into(threads, path, states, strict=False, verify="digest")
    assert [o.unverified_keys for o in outcomes] == [["model/v", "model/w"]] * 2


@pytest.mark.parametrize("swapped", [0, 1])
def test_a_container_of_another_step_is_caught(threads: Any, tmp_path: Path, swapped: int) -> None:
    name = f"rank-{swapped:05d}.pt"
    save(threads, tmp_path / "c", "rows", 2, step=3)
    save(threads, tmp_path / "d", "rows", 2, step=4)
    assert (tmp_path / "c" / name).stat().st_size == (tmp_path / "d" / name).stat().st_size
    shutil.copy(tmp_path / "d" / name, tmp_path / "c" / name)
    for m in (1, 2, 3):
        errors = refused(threads, tmp_path / "c", m, "columns")
        text = f"{tmp_path / 'c' / name} is not the container that the manifest names"
        assert all(text in str(error) for error in errors)
        assert any(isinstance(error, FormatError) for error in errors)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 32
    file.write_bytes(data)


@pytest.mark.parametrize("at", [0, 30, 44, 56, 60, 100, -1])
def test_a_flipped_catalog_is_caught(threads: Any, tmp_path: Path, at: int) -> None:
    save(threads, tmp_path / "c", "rows", 3)
    flip(tmp_path / "c" / "catalog.bin", at)
    for error in refused(threads, tmp_path / "c"):
        assert isinstance(error, (FormatError, RestoreError))
        assert str(tmp_path / "c" / "catalog.bin") in str(error)


def test_a_catalog_of_another_length_or_checkpoint_or_none_is_caught(threads: Any, tmp_path: Path) -> None:
    save(threads, tmp_path / "c", "rows", 3)
    save(threads, tmp_path / "other", "rows", 3, step=4)
    file = tmp_path / "c" / "catalog.bin"
    good = file.read_bytes()
    for bad in (good[:-1], good[:40], b"", good + b"\0", (tmp_path / "other" / "catalog.bin").read_bytes()):
        file.write_bytes(bad)
        errors = refused(threads, tmp_path / "c")
        assert all(str(file) in str(error) for error in errors)
        assert any(isinstance(error, FormatError) for error in errors)
    file.unlink()
    assert all(f"stat {file}: No such file" in str(error) for error in refused(threads, tmp_path / "c"))


def test_a_manifest_without_a_catalog_is_none_of_several_ranks(threads: Any, tmp_path: Path) -> None:
    save(threads, tmp_path / "c", "rows", 2)
    file = tmp_path / "c" / manifest.FILE
    made = manifest.open(tmp_path / "c").model_copy(update={"catalog": None})
    file.write_bytes(manifest.encode(made))
    for error in refused(threads, tmp_path / "c"):
        assert f"{file}: " in str(error)
        assert "a catalog belongs to a checkpoint of several containers" in str(error)


def test_a_damaged_part_fails_the_restore_on_all_ranks(threads: Any, tmp_path: Path) -> None:
    """The damage is found while it is read. The state has changed by then, so no rank raises a RestoreError."""
    save(threads, tmp_path / "c", "rows", 2)
    source = Stored.open(tmp_path / "c").container(1)
    assert source is not None
    row = source.index.shards.row(source.index.shards.by_key["model/w"])
    flip(source.path, int(source.index.records.data_offset[row.record]) + 7)
    first, second = restore(threads, tmp_path / "c", "rows", 2)
    assert isinstance(second, CorruptError)
    assert second.key == "model/w"
    assert isinstance(first, CommitError)
    assert not isinstance(first, RestoreError)
    assert str(first) == f"rank 1: {second}"


# --- states that do not fit


def test_one_rank_that_does_not_fit_stops_all(threads: Any, tmp_path: Path) -> None:
    save(threads, tmp_path / "c", "ranges", 2)
    states = [Rank("rows", rank, 3, {**SHAPES, "w": (96, 44 if rank == 1 else 40)}) for rank in range(3)]
    errors = restore_into(threads, tmp_path / "c", states)
    assert [type(error) for error in errors] == [RestoreError] * 3
    reason = str(errors[1])
    assert "'model/w': float32 of shape (96, 40) in the checkpoint, float32 of shape (96, 44) in the live" in reason
    assert [str(errors[0]), str(errors[2])] == [f"rank 1: {reason}"] * 2
    assert untouched(states)


def test_ranks_that_mean_different_steps_are_told_so(threads: Any, tmp_path: Path) -> None:
    def one(rank: int) -> list[str]:
        with ds.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
            state = Rank("rows", rank, 2)
            for step in (3, 4):
                ckpt.snapshot([state.model.fill(step)], step=step).wait_committed()
            state.model.fill(0)
            said = []
            for wish in (3 + rank, 4 if rank else None, 7):
                with pytest.raises((RestoreError, CheckpointNotFoundError)) as caught:
                    ckpt.restore([state.model], step=wish)
                said.append(str(caught.value))
            assert state.model.wrong(0) == []
            assert ckpt.restore([state.model], step=3).step == 3
            assert state.model.wrong(3) == []
            return said

    expected = [
        "the ranks are to restore different steps: rank 0 step 3, rank 1 step 4",
        "the ranks are to restore different steps: rank 0 the newest, rank 1 step 4",
        f"no committed checkpoint of step 7 in {tmp_path / 'run'}, only of 3, 4",
    ]
    assert threads(2, one) == [expected] * 2


def stage(rank: int, keys: str) -> Split:
    """A pipeline stage: some whole tensors, each of which one rank alone holds."""
    shapes = {key: (4, ord(key) - 90) for key in keys}
    return Split.whole("model", shapes, 0, 1)


def test_keys_of_other_ranks_are_expected_and_those_of_none_are_named(threads: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"

    def begin(rank: int) -> None:
        more = [Split.whole("unasked", {"x": (3,)}, 0, 1)] if rank == 1 else []
        ds.snapshot([stage(rank, ("ab", "cd", "e")[rank]).fill(1), *more], path, **SMALL).wait_committed()

    def go_on(parts: Sequence[str], **options: Any) -> list[Any]:
        def one(rank: int) -> Any:
            state = stage(rank, parts[rank])
            restored = ds.restore([state], path, **SMALL, **options)
            assert state.wrong(1) == []
            return restored.unexpected_keys

        return threads(len(parts), one)  # type: ignore[no-any-return]

    assert threads(3, begin) == [None] * 3
    for parts in (("ab", "cd", "e"), ("abc", "de"), ("e", "", "ab", "cd"), ("abcde",)):
        assert go_on(parts) == [[]] * len(parts)
    for parts in (("ab", "e"), ("", "", "abe", ""), ("eab",)):
        for error in go_on(parts):
            assert isinstance(error, RestoreError)
            assert error.unexpected == ["model/c", "model/d"]
            assert "the live state lacks 'model/c', 'model/d'" in str(error)
        assert go_on(parts, strict=False) == [["model/c", "model/d"]] * len(parts)


# --- deaths and deletions during a restore


@pytest.mark.long
@pytest.mark.parametrize(("stage", "number"), short.first([("finish", 3), ("choose", 1)], rest=pytest.mark.by_hand))
def test_a_rank_killed_during_a_restore_is_named_by_the_others(
    ranks: Any, tmp_path: Path, stage: str, number: int
) -> None:
    directory = tmp_path / "ckpts"
    ranks(1, LOOP, directory, "10")
    options = json.dumps({"rank_timeout": 2.5})
    word = f"restore/barrier.post=kill@{number}"
    done = ranks(3, LOOP, directory, word, may_fail=[0, 1, 2], CONFUSED="1", OPTIONS=options)
    assert done[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        told = json.loads(done[rank].stdout.splitlines()[0])
        assert told["error"] == "RanksMissingError"
        assert told["text"].startswith(f"checkpointer/restore/0/{stage}: no answer from rank 1 within")


@pytest.mark.parametrize("fallback", [False, True])
def test_a_rank_that_cannot_keep_the_checkpoint_from_deletion_stops_all(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    save(threads, tmp_path / "run" / "step-00000003", "rows", 2)
    original, calls = DirectoryTier.protect, itertools.count()

    def protect(tier: Tier, path: Location) -> Any:
        if next(calls) == 1:  # rank 0 was the first
            raise StorageError(errno.ENOLCK, "lock", str(path))
        return original(tier, path)

    monkeypatch.setattr(DirectoryTier, "protect", protect)
    first, second = refused(threads, tmp_path / "run", fallback=fallback)
    assert isinstance(first, RestoreError)
    assert str(first) == f"rank 1: {second}"
    assert isinstance(second, StorageError)
    assert second.errno == errno.ENOLCK


class Slow(Split):
    """A state that waits for an event before it gives its destinations."""

    reached = threading.Event()
    go = threading.Event()

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        self.reached.set()
        assert self.go.wait(20)
        return super().destinations(saved)


def test_what_another_job_restores_is_not_deleted(threads: Any, tmp_path: Path) -> None:
    path = tmp_path / "run" / "step-00000003"
    save(threads, path, "rows", 2)
    Slow.reached.clear(), Slow.go.clear()
    removed: list[bool] = []

    def delete() -> None:
        assert Slow.reached.wait(20)
        removed.append(tier_of(path.parent).remove(path))
        Slow.go.set()

    other = threading.Thread(target=delete)
    other.start()

    def one(rank: int) -> Any:
        state = Slow.rows("model", SHAPES, rank, 2)
        return ds.restore([state], tmp_path / "run", **SMALL).step, state.wrong(3)

    outcomes = threads(2, one)
    other.join()
    assert outcomes == [(3, [])] * 2
    assert removed == [False]
    with ds.open(path):
        assert not tier_of(path.parent).remove(path)
    assert tier_of(path.parent).remove(path)
    assert all(isinstance(error, CheckpointNotFoundError) for error in restore(threads, path, "rows", 1))


def test_a_checkpoint_deleted_before_all_ranks_hold_it_fails_on_all(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's lock does not prevent that where the file system has no locks."""
    path = tmp_path / "c"
    save(threads, path, "rows", 2)
    choose: Callable[..., bytes] = Meeting.choose

    def lose(meeting: Meeting, wish: int | None, pick: Callable[[], bytes]) -> bytes:
        head = choose(meeting, wish, pick)
        if meeting.rank == 1:
            shutil.rmtree(path)
        return head

    monkeypatch.setattr(Meeting, "choose", lose)
    first, second = refused(threads, path)
    assert f"{path} is not a committed checkpoint" in str(second)
    assert str(path) in str(first)  # it may have missed a file before it heard of rank 1
