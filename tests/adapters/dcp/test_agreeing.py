"""``async_save`` on several ranks: they plan once while nothing changes, and all are told when one fails."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hold import held
from saves import Failing

from datastates import _native
from datastates._base import faults
from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.errors import CommitError, RanksMissingError, StorageError, UnreachableError
from datastates.ranks.board_world import BoardWorld
from states import SMALL, Parts, files, loaded, problems, same

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")]
RANKS = 3
ROWS = 40
Together = Callable[[int, Callable[[int], Any]], list[Any]]
WHOLE = torch.arange(RANKS * ROWS * 1000, dtype=torch.float32).reshape(RANKS * ROWS, 1000)


def state_of(rank: int, plus: float = 0.0) -> dict[str, Any]:
    """This rank's rows of a matrix, and values that all ranks hold alike."""
    rows = (WHOLE[rank * ROWS : (rank + 1) * ROWS] + plus).clone()
    return {
        "w": Parts.of((RANKS * ROWS, 1000), {(rank * ROWS, 0): rows}),
        "alike": torch.full((30_000,), plus),
        "step": torch.tensor(plus),
        "note": {"plus": plus},
    }


def whole(plus: float = 0.0) -> dict[str, Any]:
    return {**state_of(0, plus), "w": WHOLE + plus}


@pytest.fixture
def writers() -> Iterator[list[DataStatesStorageWriter]]:
    made = [DataStatesStorageWriter(rank_timeout=10, **SMALL) for _ in range(RANKS)]
    yield made
    closers = [threading.Thread(target=writer.close) for writer in made]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of rank 0's agreements, in order."""
    names: list[str] = []
    agree = BoardWorld.agree

    def noted(self: BoardWorld, name: str, *args: Any, **kwargs: Any) -> bytes:
        if self.rank == 0:
            names.append(name)
        return agree(self, name, *args, **kwargs)

    monkeypatch.setattr(BoardWorld, "agree", noted)
    return names


def save(
    together: Together,
    writers: list[DataStatesStorageWriter],
    path: Path,
    plus: float = 0.0,
    change: Callable[[int, dict[str, Any]], Any] = lambda rank, state: None,
    planner: Callable[[int], Any] = lambda rank: None,
) -> list[BaseException | None]:
    """Save on all ranks; returns each rank's error, or None."""

    def one(rank: int) -> BaseException | None:
        state = state_of(rank, plus)
        change(rank, state)
        snapshot = ours.async_save(state, path, storage_writer=writers[rank], planner=planner(rank))
        snapshot.wait_committed(30) if snapshot.exception() is None else None
        return snapshot.exception()

    return [None if answer is None else answer for answer in together(RANKS, one)]


def test_together_they_make_one_checkpoint(together: Together, writers: Any, tmp_path: Path) -> None:
    assert save(together, writers, tmp_path) == [None] * RANKS
    assert files(tmp_path) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(RANKS))]
    for reader in ("ours", "stock"):
        same(loaded(tmp_path, whole(), reader), whole())
    assert problems(tmp_path) == []
    # one rank writes what all hold alike
    assert sum(f.stat().st_size for f in tmp_path.glob("*.distcp")) < WHOLE.nbytes + 150_000


def test_plans_are_remembered_while_nothing_changes(
    together: Together, writers: Any, tmp_path: Path, agreed: list[str]
) -> None:
    for number in range(4):
        assert save(together, writers, tmp_path / str(number), float(number)) == [None] * RANKS
        same(loaded(tmp_path / str(number), whole()), whole(float(number)))
    assert agreed == ["dcp/0/digests", "dcp/0/plans", "dcp/0/commit"] + [
        f"dcp/{n}/{step}" for n in (1, 2, 3) for step in ("digests", "commit")
    ]


def test_one_ranks_change_makes_all_plan_anew(
    together: Together, writers: Any, tmp_path: Path, agreed: list[str]
) -> None:
    def change(rank: int, state: dict[str, Any]) -> None:
        if rank == 2:
            state["own"] = torch.ones(3)

    for number, changing in enumerate((False, True, True, False, False)):
        path = tmp_path / str(number)
        failed = save(together, writers, path, float(number), change if changing else lambda *_: None)
        assert failed == [None] * RANKS
        expected = {**whole(float(number)), **({"own": torch.ones(3)} if changing else {})}
        same(loaded(path, expected), expected)
    assert [name for name in agreed if name.endswith("plans")] == ["dcp/0/plans", "dcp/1/plans", "dcp/3/plans"]


@pytest.mark.long
def test_a_rank_that_misses_a_plan_does_not_go_by_the_one_before(
    together: Together, writers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it did, no rank would write what the plan before had assigned to another rank."""
    assert save(together, writers, tmp_path / "0") == [None] * RANKS

    def change(rank: int, state: dict[str, Any]) -> None:
        if rank == 0:  # planned in another order, so that other ranks write what all hold alike
            state["w"] = state.pop("w")

    agree = BoardWorld.agree

    def missing(self: BoardWorld, name: str, *args: Any, **kwargs: Any) -> bytes:
        answer = agree(self, name, *args, **kwargs)
        if self.rank == 1 and name == "dcp/1/plans":
            raise UnreachableError("the answer did not arrive")
        return answer

    monkeypatch.setattr(BoardWorld, "agree", missing)
    assert None not in save(together, writers, tmp_path / "1", 1.0, change)
    assert save(together, writers, tmp_path / "2", 2.0, change) == [None] * RANKS
    same(loaded(tmp_path / "2", whole()), whole(2.0))


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "victim"),
    [("global", 0), *((where, victim) for where in ("local", "finish", "data", "write", "copy") for victim in (0, 1))],
)
@pytest.mark.parametrize("there", [False, True], ids=["alone", "over another"])
def test_whoever_fails_all_are_told_and_nothing_changes(
    together: Together, writers: Any, tmp_path: Path, victim: int, where: str, there: bool
) -> None:
    if there:
        assert save(together, writers, tmp_path) == [None] * RANKS
    before = files(tmp_path)

    def change(rank: int, state: dict[str, Any]) -> None:
        if rank == victim and where == "copy":
            state["lock"] = threading.Lock()
        if where == "global":
            state["more"] = torch.ones(2)  # so that they plan anew

    def planner(rank: int) -> Any:
        return Failing(where) if rank == victim and where not in ("write", "copy") else None

    if where == "write":
        # a directory stands where the victim would write its file
        (tmp_path / f"__{victim}_{int(there)}.distcp").mkdir(parents=True)
        new_file = DataStatesStorageWriter.new_file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                DataStatesStorageWriter,
                "new_file",
                lambda self, plan: (
                    Path(self.path) / f"__{victim}_{int(there)}.distcp"
                    if plan.storage_data.prefix == f"__{victim}_"
                    else new_file(self, plan)
                ),
            )
            begin = time.monotonic()
            failed = save(together, writers, tmp_path, 1.0)
        (tmp_path / f"__{victim}_{int(there)}.distcp").rmdir()
    else:
        begin = time.monotonic()
        failed = save(together, writers, tmp_path, 1.0, change, planner)
    assert time.monotonic() - begin < 7, "some waited for the time to be up"
    for rank, error in enumerate(failed):
        text = str(error)
        if where == "write":
            assert isinstance(error, StorageError if rank == victim else CommitError)
            assert "exists" in text or "Is a directory" in text
        elif where == "copy":
            assert "pickle" in text
        else:
            assert "my own reason" in text
        assert rank == victim or isinstance(error, CommitError)
        assert rank == victim or f"rank {victim}" in text or where == "global"
    assert files(tmp_path) == before
    if there:
        same(loaded(tmp_path, whole()), whole())
    # and they go on together
    assert save(together, writers, tmp_path, 2.0) == [None] * RANKS
    same(loaded(tmp_path, whole()), whole(2.0))


def test_a_rank_that_cannot_begin_a_save_stays_in_step(together: Together, writers: Any, tmp_path: Path) -> None:
    assert not any(save(together, writers, tmp_path / "a"))

    def wrong_on_one(rank: int) -> None:
        path = "oss://bucket/b" if rank == 1 else tmp_path / "b"
        ours.async_save(state_of(rank), path, storage_writer=writers[rank]).wait_committed()

    first, refused, last = together(RANKS, wrong_on_one)
    assert isinstance(refused, ValueError)
    assert [type(e) for e in (first, last)] == [CommitError] * 2
    assert "rank 1: " in str(first)
    assert not any(save(together, writers, tmp_path / "c", 1.0))


def test_a_full_disk_costs_all_ranks_this_checkpoint_only(together: Together, writers: Any, tmp_path: Path) -> None:
    assert save(together, writers, tmp_path) == [None] * RANKS
    before = files(tmp_path)
    _native.arm_fault("write", "fail", errno.ENOSPC, 2, 1)  # one write, of any rank
    failed = save(together, writers, tmp_path, 1.0)
    assert all("No space left on device" in str(error) for error in failed)
    assert [type(error) for error in failed].count(StorageError) == 1
    assert files(tmp_path) == before
    same(loaded(tmp_path, whole()), whole())


@pytest.mark.parametrize("point", ["store.write", "store.rename"])
def test_when_the_commit_fails_the_old_one_stands(together: Together, writers: Any, tmp_path: Path, point: str) -> None:
    assert save(together, writers, tmp_path) == [None] * RANKS
    before = files(tmp_path)
    faults.arm(faults.Fault(point, "fail", errno.ENOSPC))
    failed = save(together, writers, tmp_path, 1.0)
    assert all("No space left on device" in str(error) for error in failed)
    assert files(tmp_path) == before
    same(loaded(tmp_path, whole()), whole())


def test_when_the_commit_is_uncertain_all_files_are_kept(together: Together, writers: Any, tmp_path: Path) -> None:
    assert save(together, writers, tmp_path) == [None] * RANKS
    faults.arm(faults.Fault("store.sync_directory", "fail", errno.EIO, nth=RANKS + 1))
    failed = save(together, writers, tmp_path, 1.0)
    assert all("Input/output error" in str(error) for error in failed)
    same(loaded(tmp_path, whole()), whole(1.0))


@pytest.mark.by_hand
def test_a_rank_that_does_not_come_is_named(together: Together, tmp_path: Path) -> None:
    """The optimizers of the others wait for it no longer than ``rank_timeout``."""
    writers = [DataStatesStorageWriter(rank_timeout=1, **SMALL) for _ in range(RANKS)]
    parameter = torch.nn.Parameter(torch.ones(100_000))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)

    def one(rank: int) -> Any:
        if rank == 2:
            return None
        snapshot = ours.async_save({"p": parameter}, tmp_path, storage_writer=writers[rank])
        optimizer.step()
        snapshot.wait_committed(20)
        return None

    answers = together(RANKS, one)
    assert all(isinstance(error, RanksMissingError) for error in answers[:2])
    assert 2 in answers[0].ranks
    assert files(tmp_path) == []
    together(RANKS, lambda rank: writers[rank].close())


def test_without_a_writer_the_world_is_left_only_when_all_is_done(together: Together, tmp_path: Path) -> None:
    """The ranks still have to vote after the call has returned."""
    returned = threading.Barrier(RANKS, _native.clear_faults)

    def one(rank: int) -> None:
        snapshot = ours.async_save(state_of(rank), tmp_path, rank_timeout=10, **SMALL)
        returned.wait(30)
        snapshot.wait_committed(30)

    with held("sync"):
        assert together(RANKS, one) == [None] * RANKS
    same(loaded(tmp_path, whole()), whole())


def test_without_a_writer_a_failure_is_told_before_the_world_is_left(together: Together, tmp_path: Path) -> None:
    def one(rank: int) -> None:
        planner = Failing("data") if rank == 1 else None
        ours.async_save(state_of(rank), tmp_path, planner=planner, rank_timeout=60, **SMALL).wait_committed(90)

    begin = time.monotonic()
    failed = together(RANKS, one)
    assert time.monotonic() - begin < 30
    assert all("my own reason" in str(error) for error in failed)


def test_ranks_that_hold_nothing(together: Together, writers: Any, tmp_path: Path) -> None:
    def one(rank: int) -> None:
        state = {"w": torch.arange(5.0)} if rank == 1 else {}
        ours.async_save(state, tmp_path, storage_writer=writers[rank]).wait_committed(30)

    assert together(RANKS, one) == [None] * RANKS
    same(loaded(tmp_path, {"w": torch.arange(5.0)}), {"w": torch.arange(5.0)})
