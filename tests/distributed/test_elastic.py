"""M ranks restore checkpoints of N ranks, in any layouts: bit for bit, reading little more than is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import short
from elastic_state import LAYOUTS, SHAPES, check, live_nbytes, reseal, restore, save

import datastates as ds
from datastates.errors import CorruptError
from datastates.reading.stored import Stored
from datastates.restoring import restore as restoring
from datastates.state.shards import Shard

LOOP = Path(__file__).with_name("rank_loop.py")


@pytest.mark.parametrize("n", short.first([3, 1, 2, 4, 5, 6, 7, 8], rest=pytest.mark.by_hand))
def test_any_number_of_ranks_restores_what_any_number_saved(threads: Any, tmp_path: Path, n: int) -> None:
    for i, layout in enumerate(LAYOUTS):
        save(threads, tmp_path / layout, layout, n)
        for m in range(1 + (n + i) % 2, 9, 2):  # the other half of m with the next layout
            other = LAYOUTS[(i + m // 2 + n // 2) % len(LAYOUTS)]
            outcomes = restore(threads, tmp_path / layout, other, m, verify="digest")
            check(outcomes, n)


@pytest.mark.long
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_is_restored_as_every_other(threads: Any, tmp_path: Path, saved: str) -> None:
    save(threads, tmp_path / "c", saved, 3)
    stored = Stored.open(tmp_path / "c")
    for layout in LAYOUTS:
        outcomes = restore(threads, tmp_path / "c", layout, 4, verify="digest")
        check(outcomes, 3)
        undigested = sorted(f"model/{key}" for key in SHAPES if stored.digest(f"model/{key}") is None)
        assert all(restored.unverified_keys == undigested for restored, _ in outcomes)
        assert undigested == [] or saved in ("columns", "grid", "mixed")  # narrow columns have too many runs


LARGE = {"w": (2048, 1024), "flat": (1_500_000,), "cube": (64, 96, 128), "small": (100, 70)}


@pytest.mark.parametrize(
    ("n", "m", "direct"), short.first([(4, 2, True), (3, 5, True), (1, 4, True), (4, 1, True), (2, 4, False)])
)
def test_no_rank_reads_much_more_than_it_needs(threads: Any, tmp_path: Path, n: int, m: int, direct: bool) -> None:
    for i, saved in enumerate(LAYOUTS):
        save(threads, tmp_path / saved, saved, n, shapes=LARGE)
        for other in (LAYOUTS[(i + 1) % len(LAYOUTS)], LAYOUTS[(i + 3) % len(LAYOUTS)]):
            outcomes = restore(threads, tmp_path / saved, other, m, LARGE, direct_io=direct)
            check(outcomes, n)
            assert [r.needed_nbytes for r, _ in outcomes] == [live_nbytes(state) for _, state in outcomes]
            for restored, _ in outcomes:
                read = restored.read_nbytes - restored.shared_nbytes
                assert restored.needed_nbytes <= read <= 1.05 * restored.needed_nbytes
            assert outcomes[0][0].unverified_keys == []  # a digest covers what no checksum covers


def test_little_states_are_read_verified_as_a_whole(threads: Any, tmp_path: Path) -> None:
    """Below a megabyte, verification is worth more than the bytes that it reads."""
    save(threads, tmp_path / "c", "rows", 2)
    outcomes = restore(threads, tmp_path / "c", "columns", 4)
    check(outcomes, 2)
    for restored, state in outcomes:
        assert restored.needed_nbytes == live_nbytes(state)
        assert restored.read_nbytes <= restored.needed_nbytes + (1 << 20)


# --- digests


@pytest.mark.parametrize(
    ("saved", "live"), [("rows", "columns"), ("ranges", "grid"), ("whole", "rows"), ("rows", "whole")]
)
def test_contents_that_only_the_digest_knows_to_be_wrong_are_named(
    threads: Any, tmp_path: Path, saved: str, live: str
) -> None:
    save(threads, tmp_path / "c", saved, 3)
    owner = next(r for r in range(3) if Stored.open(tmp_path / "c").container(r).index.shards.row(0).part.numel)
    reseal(tmp_path / "c", owner, "model/w", at=5)
    outcomes = restore(threads, tmp_path / "c", live, 4)
    assert [restored.step for restored, _ in outcomes] == [3] * 4  # all checksums are right
    outcomes = restore(threads, tmp_path / "c", live, 4, verify="digest")
    for error in outcomes:
        assert isinstance(error, CorruptError), error
        assert (error.key, error.path) == ("model/w", str(tmp_path / "c"))
        assert "'model/w'" in str(error)
        assert "digest" in str(error)


@pytest.mark.parametrize("live", ["rows", "whole", "ranges"])
def test_memory_that_changes_behind_the_read_is_found(
    threads: Any, tmp_path: Path, live: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes on one rank only. With replicas, the ranks then differ."""
    save(threads, tmp_path / "c", "columns", 2, shapes={"w": (64, 64), "v": (50,)})
    taken = restoring.contributions

    def flipped(shards: Sequence[Shard]) -> Iterator[int]:
        for shard in shards:
            source: Any = shard.source
            if shard.key == "v" and source.size and not spoiled:
                spoiled.append(shard.key)
                source.reshape(-1)[:1] += 1
        return taken(shards)

    spoiled: list[str] = []
    monkeypatch.setattr(restoring, "contributions", flipped)
    outcomes = restore(threads, tmp_path / "c", live, 3, {"w": (64, 64), "v": (50,)}, verify="digest")
    assert [(type(e), getattr(e, "key", None)) for e in outcomes] == [(CorruptError, "model/v")] * 3
    monkeypatch.undo()


def test_an_error_in_taking_the_digest_is_told_to_all(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(threads, tmp_path / "c", "rows", 2)
    taken = restoring.contributions

    def failing(shards: Sequence[Shard]) -> Iterator[int]:
        if any(shard.offset is not None and shard.offset[:1] == (32,) for shard in shards):
            raise ds.DatastatesError("no copy")
        return taken(shards)

    monkeypatch.setattr(restoring, "contributions", failing)
    outcomes = restore(threads, tmp_path / "c", "rows", 3, verify="digest")
    assert [str(e) for e in outcomes] == ["rank 1: no copy", "no copy", "rank 1: no copy"]


@pytest.mark.parametrize("digested", [True, False])
def test_what_is_read_without_checksums_is_verified_by_digest(threads: Any, tmp_path: Path, digested: bool) -> None:
    """The ranks want, and read, little of each checksummed chunk."""
    saved, live, odd = ("rows", "columns", (1800, 2000)) if digested else ("columns", "planes", (200, 200, 50))
    shapes = {"w": (256, 8192), "odd": odd}
    path = tmp_path / "c"
    save(threads, path, saved, 4, shapes=shapes)
    outcomes = restore(threads, path, live, 3, shapes)
    check(outcomes, 4)
    for restored, _ in outcomes:
        assert restored.unverified_keys == ([] if digested else ["model/odd"])  # 52 bytes a run: not digested
        assert restored.read_nbytes <= 1.05 * restored.needed_nbytes
        assert restored.shared_nbytes == 0
    if not digested:
        return
    source = Stored.open(path).container(2)
    assert source is not None
    row = source.index.shards.row(source.index.shards.by_key["model/odd"])
    at = int(source.index.records.data_offset[row.record]) + row.offset + 1_000_003
    data = bytearray(source.path.read_bytes())
    data[at] ^= 16
    source.path.write_bytes(data)
    outcomes = restore(threads, path, "columns", 3, shapes)
    assert [(type(e), getattr(e, "key", None)) for e in outcomes] == [(CorruptError, "model/odd")] * 3


# --- processes


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "n", "live", "m"),
    short.first([("ranges", 1, "columns", 3), ("rows", 3, "ranges", 2)], rest=pytest.mark.by_hand),
)
def test_processes_restore_what_other_processes_saved(
    ranks: Any, tmp_path: Path, saved: str, n: int, live: str, m: int
) -> None:
    directory = tmp_path / "ckpts"
    ranks(n, LOOP, directory, "10", "20", LAYOUT=saved)
    done = ranks(m, LOOP, directory, "restore", "30", "restore", LAYOUT=live)
    for rank, each in enumerate(done):
        first, saved_again, last, _ = map(json.loads, each.stdout.splitlines())
        del first["seconds"], last["seconds"]
        missing = ["rng"] if rank >= n else []
        assert first == {"word": "restore", "step": 20, "epoch": 20, "wrong": [], "missing": missing}
        assert saved_again["committed"] == "step-00000030"
        assert last == {"word": "restore", "step": 30, "epoch": 30, "wrong": [], "missing": []}
