"""Ranks of a host that want columns of the same matrices: each reads and verifies a share for all."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import short
from elastic_state import LAYOUTS, SMALL, Rank, check, live_nbytes, restore, save
from split_state import Split

import datastates as ds
from datastates.commit.manifest import container_name
from datastates.container.file import open_container
from datastates.errors import CorruptError, DatastatesError
from datastates.executor.executor import Exchange, Executor
from datastates.ranks.neighbours import Listener
from datastates.reading import exchange
from datastates.reading.reads import Reads

LOOP = Path(__file__).with_name("rank_loop.py")
SHAPES = {"w": (2048, 1024), "odd": (900, 333), "cube": (64, 96, 60), "narrow": (5000, 3), "flat": (300_000,)}


@pytest.fixture(autouse=True)
def _little_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MINIMUM", 1)


@pytest.mark.parametrize(("n", "m"), short.first([(3, 4), (2, 2), (1, 3), (4, 6)]))
def test_what_is_exchanged_is_restored(threads: Any, tmp_path: Path, n: int, m: int) -> None:
    for saved in ("rows", "ranges", "grid"):
        save(threads, tmp_path / saved, saved, n, shapes=SHAPES)
        for live in LAYOUTS:
            outcomes = restore(threads, tmp_path / saved, live, m, SHAPES)
            check(outcomes, n)
            assert [r.needed_nbytes for r, _ in outcomes] == [live_nbytes(state) for _, state in outcomes]
            odd = {"model/narrow"} if saved == "grid" else set()  # too many runs for a digest
            assert all(set(r.unverified_keys) <= odd for r, _ in outcomes)
            if live == "columns" and saved != "grid":
                assert all(r.received_nbytes > 0.3 * r.needed_nbytes for r, _ in outcomes)


@pytest.mark.parametrize("m", [2, 3, 5])
def test_each_byte_is_read_once_for_all_ranks(threads: Any, tmp_path: Path, m: int) -> None:
    shapes = {"w": (2048, 1024), "v": (3000, 500)}
    save(threads, tmp_path / "c", "rows", 3, shapes=shapes)
    outcomes = restore(threads, tmp_path / "c", "columns", m, shapes)
    check(outcomes, 3)
    results = [restored for restored, _ in outcomes]
    total = sum(4 * math.prod(shape) for shape in shapes.values())
    assert sum(r.needed_nbytes for r in results) == total
    assert total <= sum(r.read_nbytes for r in results) <= 1.2 * total  # a chunk where two shares meet is read twice
    assert sum(r.received_nbytes for r in results) == pytest.approx(total * (m - 1) / m, rel=0.02)
    assert all(r.shared_nbytes == 0 for r in results)


def test_ranks_that_hold_the_same_columns_get_them_from_one_read(threads: Any, tmp_path: Path) -> None:
    shapes = {"w": (2048, 1024)}
    save(threads, tmp_path / "c", "rows", 2, shapes=shapes)

    def one(rank: int) -> tuple[Any, Split]:
        state = Split.columns("model", shapes, rank % 2, 2)
        return ds.restore([state], tmp_path / "c", keys=["model"], **SMALL), state

    outcomes = threads(4, one)
    assert all(state.wrong(3) == [] for _, state in outcomes)
    assert sum(restored.read_nbytes for restored, _ in outcomes) <= 1.2 * 4 * math.prod(shapes["w"])
    assert sum(restored.received_nbytes for restored, _ in outcomes) == 2 * 3 * math.prod(shapes["w"])


def test_a_comparison_exchanges_nothing(threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "Listener", None)
    save(threads, tmp_path / "c", "rows", 2, shapes=SHAPES)
    outcomes = threads(2, lambda rank: ds.compare(Rank("columns", rank, 2, SHAPES).providers, tmp_path / "c"))
    assert [outcome for outcome in outcomes if isinstance(outcome, Exception)] == []


# --- faults: what does not arrive is read from the file


def alone(outcomes: list[Any]) -> None:
    """Check that all ranks have restored everything without the others."""
    check(outcomes, 2)
    for restored, state in outcomes:
        assert restored.received_nbytes == 0
        assert restored.needed_nbytes == live_nbytes(state)
        assert restored.unverified_keys == []


def test_ranks_that_cannot_listen_read_alone(threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Listener:
        raise OSError("no sockets here")

    monkeypatch.setattr(exchange, "Listener", refuse)
    save(threads, tmp_path / "c", "rows", 2, shapes=SHAPES)
    alone(restore(threads, tmp_path / "c", "columns", 3, SHAPES))


@pytest.mark.parametrize("method", ["connect", "swap"])
def test_ranks_that_lose_one_while_they_connect_read_alone(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    class Lame(Listener):
        """On one rank it fails."""

        def connect(self, ranks: Any) -> Any:
            return self._do("connect", ranks)

        def swap(self, *arguments: Any) -> Any:
            return self._do("swap", *arguments)

        def _do(self, what: str, *arguments: Any) -> Any:
            if what == method and self._rank == 1:
                raise OSError("the connection is lost")
            return getattr(super(), what)(*arguments)

    monkeypatch.setattr(exchange, "Listener", Lame)
    save(threads, tmp_path / "c", "rows", 2, shapes=SHAPES)
    alone(restore(threads, tmp_path / "c", "columns", 3, SHAPES))


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rank_does_not_send_the_others_read(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    begun, real = [], Executor.begin_exchange

    def begin(*arguments: Any) -> Exchange:
        begun.append(1)
        if len(begun) > 1:
            return real(*arguments)
        if fails:
            raise RuntimeError("no thread")
        made = real(*arguments)
        made.close()
        return made

    monkeypatch.setattr(Executor, "begin_exchange", begin)
    save(threads, tmp_path / "c", "rows", 2, shapes=SHAPES)
    outcomes = restore(threads, tmp_path / "c", "columns", 3, SHAPES)
    check(outcomes, 2)
    received = sorted(restored.received_nbytes for restored, _ in outcomes)
    assert received[0] == 0
    assert received[1] > 0
    assert [r.needed_nbytes for r, _ in outcomes] == [live_nbytes(state) for _, state in outcomes]


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_is_found_by_who_reads_it_and_by_who_wants_it(threads: Any, tmp_path: Path, rank: int) -> None:
    save(threads, tmp_path / "c", "rows", 2, shapes=SHAPES)
    path = tmp_path / "c" / container_name(rank)
    index, data = open_container(path).index, bytearray(path.read_bytes())
    row = index.shards.row(index.shards.by_key["model/w"])
    data[int(index.records.data_offset[row.record]) + 1_000_003] ^= 4
    path.write_bytes(data)
    outcomes = restore(threads, tmp_path / "c", "columns", 3, SHAPES)
    assert all(isinstance(outcome, DatastatesError) for outcome in outcomes), outcomes
    found = [outcome for outcome in outcomes if isinstance(outcome, CorruptError)]
    assert found
    assert all(error.key == "model/w" for error in found)
    told = {str(error) for error in outcomes}
    assert all("model/w" in text for text in told)


def test_a_rank_that_cannot_begin_to_read_does_not_keep_the_others(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, real = [], Reads._submit

    def fail(reads: Reads, *arguments: Any) -> None:
        if not failed:
            failed.append(reads)
            raise DatastatesError("no more files")
        real(reads, *arguments)

    monkeypatch.setattr(Reads, "_submit", fail)
    save(threads, tmp_path / "c", "rows", 2, shapes=SHAPES)
    outcomes = restore(threads, tmp_path / "c", "columns", 3, SHAPES)
    assert all(isinstance(outcome, DatastatesError) for outcome in outcomes)
    assert all("no more files" in str(outcome) for outcome in outcomes)


LARGE = json.dumps({"w": (4096, 1024), "v": (6000, 1000)})


@pytest.mark.long
def test_processes_exchange_columns(ranks: Any, tmp_path: Path) -> None:
    directory = tmp_path / "ckpts"
    ranks(2, LOOP, directory, "10", SHAPES=LARGE)
    for done in ranks(3, LOOP, directory, "restore", LAYOUT="columns", SHAPES=LARGE):
        said = json.loads(done.stdout.splitlines()[0])
        assert (said["step"], said["wrong"]) == (10, [])
        assert said["received"] > 9_000_000


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_sends_is_missed(ranks: Any, tmp_path: Path) -> None:
    """The others read its share, and then wait for it in vain."""
    directory = tmp_path / "ckpts"
    ranks(2, LOOP, directory, "10", SHAPES=LARGE)
    options = json.dumps({"rank_timeout": 5, "io_backend": "pwrite"})
    variables = {"LAYOUT": "columns", "SHAPES": LARGE, "CONFUSED": "1", "OPTIONS": options}
    first, killed, last = ranks(3, LOOP, directory, "restore/read=kill@5", may_fail=(1,), **variables)
    assert killed.returncode == -signal.SIGKILL
    for done in (first, last):
        said = json.loads(done.stdout.splitlines()[0])
        assert said["error"] == "RanksMissingError"
        assert "rank 1" in said["text"]
