"""Ranks that agree: threads as ranks, over torch's stores, over JAX's service and over a shared directory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coordination import Coordination
from memory_keys import Memory, MemoryKeys
from voting import ALL, SECONDS, SIZE, agree, joined, over_directory, together

from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.errors import (
    ClosedError,
    CommitError,
    RanksMissingError,
    SettingsError,
    StorageError,
    UnreachableError,
    rank_names,
)
from datastates.ranks import join
from datastates.ranks.board_world import DONE, FAILED, MOST_TOLD, BoardWorld
from datastates.ranks.jax_keys import JaxKeys
from datastates.ranks.join import FOLDER
from datastates.ranks.keys import Keys
from datastates.ranks.store_board import PIECE, StoreBoard
from datastates.ranks.torch_keys import TorchKeys
from datastates.ranks.world import SoloWorld, World, world_of

MOST_KEYS = 12 * (MOST_TOLD + 1)
"""The most keys, or files, that the ranks ever leave: some for each agreement that rank 0 has not cleared away."""
SLACK = 2.0
"""Seconds that a busy machine may add."""
Worlds = Callable[[], list[World]]


def give_up(worlds: list[Any], name: str = "name") -> list[Any]:
    """Agree without the ranks that are not given: once the given ones have voted, rank 0 waits half a second more."""
    first, *others = worlds

    def coordinate() -> bytes:
        while first._board.marks(f"{name}.votes") < len(others):
            time.sleep(0.001)
        first.timeout = 0.5
        return first.agree(name, f"<{first.rank}>".encode(), joined)

    told, heard = together(coordinate, lambda: agree(others, name))
    return [told, *heard]


def distributed() -> Any:
    return pytest.importorskip("torch.distributed", reason="torch is not installed: its Store was NOT tried")


def server() -> Any:
    return distributed().TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def over(keys: Callable[[int], Keys]) -> list[World]:
    return [BoardWorld(rank, SIZE, StoreBoard(keys(rank), "ckpts/1"), timeout=SECONDS) for rank in range(SIZE)]


def over_store(store: Any) -> list[World]:
    prefixed = distributed().PrefixStore("job", store)
    return over(lambda rank: TorchKeys(prefixed, rank, silence=SECONDS))


def over_memory(memory: Memory) -> list[World]:
    return over(lambda rank: MemoryKeys(memory, rank))


def over_jax(coordination: Coordination) -> list[World]:
    return over(lambda rank: JaxKeys(coordination.service, rank, silence=SECONDS))


@pytest.fixture(params=["memory", "tcp", "jax", "directory"])
def worlds(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[World]]:
    """One world for each rank."""
    if request.param == "directory":
        made = over_directory(tmp_path)
    elif request.param == "jax":
        made = over_jax(request.getfixturevalue("coordination"))
    elif request.param == "tcp":
        made = over_store(server())
    else:
        made = over_memory(Memory())
    yield made
    for world in reversed(made):
        world.close()


def test_all_learn_what_rank_0_decides(worlds: list[World]) -> None:
    deciders = []

    def decide(votes: dict[int, bytes]) -> bytes:
        deciders.append(threading.current_thread())
        return joined(votes)

    assert agree(worlds, decide=decide) == [ALL] * SIZE
    assert len(deciders) == 1


def test_ranks_may_come_in_any_order(worlds: list[World]) -> None:
    for late in range(SIZE):

        def come(world: World, late: int = late) -> bytes:
            time.sleep(0.1 if world.rank == late else 0)
            return world.agree(f"late {late}", f"<{world.rank}>".encode(), joined)

        assert together(*(lambda w=w: come(w) for w in worlds)) == [ALL] * SIZE


def test_missing_ranks_are_named_to_all_that_wait(worlds: list[World]) -> None:
    begin = time.monotonic()
    outcomes = give_up([w for w in worlds if w.rank in (0, 2)])
    assert time.monotonic() - begin < 0.5 + SLACK
    assert [type(o) for o in outcomes] == [RanksMissingError] * 2
    assert [o.ranks for o in outcomes] == [(1, 3)] * 2
    assert {str(o) for o in outcomes} == {"name: no answer from ranks 1, 3 within 0.4 s"}
    # ranks that come late learn the outcome at once, and their votes do not count
    begin = time.monotonic()
    late = agree([w for w in worlds if w.rank in (1, 3)])
    assert [str(o) for o in late] == [str(o) for o in outcomes]
    assert time.monotonic() - begin < SLACK
    assert agree(worlds, "next") == [ALL] * SIZE


def test_without_the_coordinator_it_is_named(worlds: list[World]) -> None:
    outcomes = agree(worlds[1:], timeout=0.5)
    assert [o.ranks for o in outcomes] == [(0,)] * 3
    # rank 0 comes late: the votes that the others took back do not count
    (late,) = agree(worlds[:1])
    assert isinstance(late, RanksMissingError)
    assert late.ranks in {(1,), (2,), (3,)}
    assert "stopped waiting" in str(late)
    assert agree(worlds, "next") == [ALL] * SIZE


@pytest.mark.long
def test_who_runs_out_of_time_while_it_is_decided_waits_for_the_answer(worlds: list[World]) -> None:
    def decide(votes: dict[int, bytes]) -> bytes:
        time.sleep(1.2)
        return joined(votes)

    assert agree(worlds, decide=decide, timeout=1) == [ALL] * SIZE


@pytest.mark.parametrize("failed", [0, 2])
def test_a_failed_vote_ends_the_wait(worlds: list[World], failed: int) -> None:
    def decide(votes: dict[int, bytes]) -> bytes:
        raise ValueError(f"of rank {[r for r, vote in votes.items() if vote == b'-failed']}")

    def vote(world: World) -> bytes:
        text = b"-failed" if world.rank == failed else b"fine"
        return world.agree("name", text, decide)

    begin = time.monotonic()
    outcomes = together(*(lambda w=w: vote(w) for w in worlds if w.rank != 3))
    assert time.monotonic() - begin < SLACK
    assert [str(o) for o in outcomes] == [f"ValueError: of rank [{failed}]"] * 3
    assert [str(o) for o in together(lambda: vote(worlds[3]))] == [f"ValueError: of rank [{failed}]"]


@pytest.mark.parametrize(
    ("error", "text"),
    [(KeyError("k"), "KeyError: 'k'"), (StorageError(28, "write", "f"), "write f: No space left on device [errno 28]")],
)
def test_all_raise_what_the_decision_raised(worlds: list[World], error: Exception, text: str) -> None:
    def decide(votes: dict[int, bytes]) -> bytes:
        raise error

    outcomes = agree(worlds, decide=decide)
    assert [type(o) for o in outcomes] == [CommitError] * SIZE
    assert {str(o) for o in outcomes} == {text}
    assert outcomes[0].__cause__ is error
    assert agree(worlds, "next") == [ALL] * SIZE


def test_an_interrupted_coordinator_tells_the_others(worlds: list[World]) -> None:
    def decide(votes: dict[int, bytes]) -> bytes:
        raise KeyboardInterrupt

    def interrupted() -> str:
        with pytest.raises(KeyboardInterrupt):
            worlds[0].agree("name", b"<0>", decide)
        return "interrupted"

    others = (lambda w=w: w.agree("name", b"", decide) for w in worlds[1:])
    assert [str(o) for o in together(interrupted, *others)] == ["interrupted"] + ["KeyboardInterrupt"] * 3


def test_several_agreements_at_once_on_any_threads(worlds: list[World]) -> None:
    names = [f"name {i}" for i in range(6)]

    def all_names(world: World) -> list[bytes]:
        order = names[world.rank :] + names[: world.rank]
        calls = (lambda n=n: world.agree(n, f"<{world.rank}>".encode(), joined) for n in order)
        return together(*calls)

    assert together(*(lambda w=w: all_names(w) for w in worlds)) == [[ALL] * len(names)] * SIZE


@pytest.mark.parametrize("nbytes", [0, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_payloads_of_any_length(worlds: list[World], nbytes: int) -> None:
    data = os.urandom(nbytes)

    def decide(votes: dict[int, bytes]) -> bytes:
        assert votes == {rank: bytes([rank]) + data for rank in range(SIZE)}
        return data

    calls = (lambda w=w: w.agree("name", bytes([w.rank]) + data, decide) for w in worlds)
    assert together(*calls) == [data] * SIZE


def test_names_may_hold_anything(worlds: list[World]) -> None:
    for name in ("../up", "a/b", "", ".", "x" * 5000, "é\n\0"):
        assert agree(worlds, name) == [ALL] * SIZE


def test_tokens_are_alike_on_all_ranks_and_of_one_run(worlds: list[World], tmp_path: Path) -> None:
    tokens = {name: {w.token(name) for w in worlds} for name in ("a", "b")}
    assert [len(t) for t in tokens.values()] == [1, 1]
    assert tokens["a"] != tokens["b"]
    assert all(len(token) == 8 and int(token, 16) >= 0 for each in tokens.values() for token in each)
    others = over_memory(Memory())
    assert others[0].token("a") not in tokens["a"]
    for world in others:
        world.close()


def test_a_closed_world_is_refused(worlds: list[World]) -> None:
    worlds[1].close()
    with pytest.raises(ClosedError):
        worlds[1].agree("name", b"", joined)
    with pytest.raises(ClosedError):
        worlds[1].token("name")
    worlds[1].close()


def test_a_forked_child_is_no_rank(worlds: list[World]) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            worlds[1].agree("name", b"", joined)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        worlds[0].close()
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as told:
        assert told.read() == "CommitError: this process was forked off rank 1 and is no rank of its own"
    assert agree(worlds) == [ALL] * SIZE


# --- what is left behind


@pytest.mark.long
@pytest.mark.parametrize("kind", ["memory", "tcp", "jax"])
def test_keys_do_not_pile_up_and_none_is_left(kind: str, request: pytest.FixtureRequest) -> None:
    store: Any
    if kind == "jax":
        store, over_it = request.getfixturevalue("coordination"), over_jax
    else:
        store, over_it = (server(), over_store) if kind == "tcp" else (Memory(), over_memory)
    before = store.num_keys()
    worlds = over_it(store)
    most = 0
    for i in range(20):
        large = os.urandom(PIECE + 1 if i % 5 == 0 else 10)
        outcomes = agree(worlds, f"name {i}", decide=lambda votes, large=large: large)
        assert outcomes == [large] * SIZE
        if i % 4 == 0:
            assert [o.ranks for o in give_up(worlds[:2], f"missing {i}")] == [(2, 3)] * 2
            assert agree(worlds[2:], f"missing {i}")[0].ranks == (2, 3)
        most = max(most, store.num_keys())
    assert most - before < MOST_KEYS
    for world in worlds:
        world.close()
    assert store.num_keys() == before


def test_keys_do_not_pile_up_while_rank_0_waits_for_nobody() -> None:
    memory = Memory()
    worlds = over_memory(memory)
    for i in range(10 * MOST_TOLD):
        votes = [lambda w=w, i=i: w.agree(f"{i}", (DONE, FAILED)[w.rank == 0], lambda _: b"") for w in worlds]
        assert together(*votes) == [b""] * SIZE
        assert memory.num_keys() < MOST_KEYS


def test_no_file_is_left(tmp_path: Path) -> None:
    worlds = over_directory(tmp_path)
    for i in range(10):
        assert agree(worlds, f"name {i}") == [ALL] * SIZE
        assert len(list((tmp_path / FOLDER).rglob("*"))) < MOST_KEYS
    for world in worlds:
        world.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_the_ranks_is_no_checkpoint(tmp_path: Path) -> None:
    worlds = over_directory(tmp_path)
    assert (tmp_path / FOLDER).is_dir()
    assert newest.committed(tier_of(tmp_path)) == {}
    assert tier_of(tmp_path).debris() == []
    for world in worlds:
        world.close()


def test_the_coordinator_closes_last(worlds: list[World]) -> None:
    told = threading.Event()

    def slow() -> float:
        told.wait()
        time.sleep(0.3)
        begin = time.monotonic()
        with pytest.raises(RanksMissingError):
            worlds[3].agree("name", b"<3>", joined)
        return begin

    def closing() -> float:
        worlds[0].timeout = 0.1
        with pytest.raises(RanksMissingError):
            worlds[0].agree("name", b"<0>", joined)
        told.set()
        worlds[0].timeout = SECONDS
        worlds[0].close()
        return time.monotonic()

    others = (lambda w=w: w.agree("name", f"<{w.rank}>".encode(), joined) for w in worlds[1:3])
    closed, read, *_ = together(closing, slow, *others)
    assert read <= closed


# --- the store


def test_over_a_file_of_torch(tmp_path: Path) -> None:
    worlds = over_store(distributed().FileStore(str(tmp_path / "store"), -1))
    for name in ("a", "b"):
        assert agree(worlds, name) == [ALL] * SIZE
    assert [o.ranks for o in give_up(worlds[:2], "missing")] == [(2, 3)] * 2
    assert agree(worlds[2:], "missing")[0].ranks == (2, 3)
    for world in worlds:
        world.close()


def test_a_store_that_ends_is_told_in_words() -> None:
    store = server()
    clients = [distributed().TCPStore("localhost", store.port, is_master=False) for _ in range(SIZE)]
    worlds = [
        BoardWorld(rank, SIZE, StoreBoard(TorchKeys(client, rank, silence=SECONDS), "ckpts/1"), timeout=SECONDS)
        for rank, client in enumerate(clients)
    ]
    assert agree(worlds) == [ALL] * SIZE
    del store
    outcomes = agree(worlds[1:], "next")
    assert [type(o) for o in outcomes] == [UnreachableError] * 3
    for rank, outcome in enumerate(outcomes, 1):
        assert f"the Store of torch.distributed is out of rank {rank}'s reach (" in str(outcome)
    for world in worlds:
        world.close()


def test_jaxs_service_that_ends_is_told_in_words(another_coordination: Coordination) -> None:
    worlds = over_jax(another_coordination)
    assert agree(worlds) == [ALL] * SIZE
    another_coordination.end()
    begin = time.monotonic()
    outcomes = agree(worlds[1:], "next")
    assert time.monotonic() - begin < SLACK
    assert [type(o) for o in outcomes] == [UnreachableError] * 3
    for rank, outcome in enumerate(outcomes, 1):
        assert str(outcome).startswith(f"JAX's coordination service is out of rank {rank}'s reach (UNAVAILABLE: ")
    for world in worlds:
        world.close()


class Stalled:
    """A store that stops answering when told."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.go = threading.Event()
        self.go.set()

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.go.wait()
            return method(*arguments)

        return call


def test_a_store_that_does_not_answer_holds_up_nobody_for_long() -> None:
    store = Stalled(distributed().HashStore())
    worlds = [BoardWorld(r, 2, StoreBoard(TorchKeys(store, r, silence=1), "c/1"), timeout=SECONDS) for r in range(2)]
    assert agree(worlds) == [b"<0><1>"] * 2
    store.go.clear()
    begin = time.monotonic()
    outcomes = agree(worlds, "next")
    assert time.monotonic() - begin < 1 + SLACK
    assert ["no answer within 1 s" in str(o) for o in outcomes] == [True, True]
    store.go.set()
    for world in worlds:
        world._board._keys._call._stuck.result(SECONDS)
    assert agree(worlds, "later") == [b"<0><1>"] * 2
    for world in worlds:
        world.close()


def test_training_that_blocks_in_the_store_does_not_block_the_ranks() -> None:
    store = server()
    worlds = over_store(store)
    blocked = threading.Thread(target=store.get, args=("training",))
    blocked.start()
    time.sleep(0.1)
    begin = time.monotonic()
    assert agree(worlds) == [ALL] * SIZE
    assert time.monotonic() - begin < SLACK
    other = distributed().TCPStore("localhost", store.port, is_master=False)
    assert blocked.is_alive()
    other.set("training", "goes on")
    blocked.join()
    for world in reversed(worlds):
        world.close()


# --- which world this is


def test_alone(tmp_path: Path) -> None:
    for world in (world_of(None, None, tmp_path, 1), world_of(0, 1, tmp_path, 1)):
        assert isinstance(world, SoloWorld)
        assert (world.rank, world.size) == (0, 1)
        assert world.agree("name", b"<0>", joined) == b"<0>"
        with pytest.raises(AttributeError):  # no other rank has to be told, so the error is raised as it is
            world.agree("name", b"", lambda votes: votes.nothing)  # type: ignore[attr-defined]
        assert world.token("a") == world.token("a") != world.token("b")
        world.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        (None, 2, "rank: rank and world_size are given together or not at all"),
        (1, None, "world_size: rank and world_size are given together or not at all"),
        (2, 2, "rank: 2 is not from 0 to 1"),
        (-1, 2, "rank: -1 is not from 0 to 1"),
        (0, 0, "world_size: 0 is less than 1"),
        ("0", 2, "rank: '0' is not an integer"),
        (0, True, "world_size: True is not an integer"),
    ],
)
def test_impossible_numbers_are_named(tmp_path: Path, rank: Any, world_size: Any, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        world_of(rank, world_size, tmp_path, 1)
    assert str(caught.value).startswith(text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 1, 2, 7, 9, 10], "ranks 0-2, 7, 9-10"),
        (range(4096), "ranks 0-4095"),
        (range(0, 100, 2), f"ranks {', '.join(map(str, range(0, 32, 2)))} and 34 more"),
    ],
)
def test_ranks_in_messages(ranks: list[int], text: str) -> None:
    assert rank_names(ranks) == text


def test_a_rank_0_that_cannot_meet_the_others_holds_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageError(28, "write", "session")

    monkeypatch.setattr(join, "_seen", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError, match="session"):
        world_of(0, 2, tmp_path, 1)
    assert set(os.listdir("/proc/self/fd")) <= set(before)
    assert [entry.name for entry in (tmp_path / FOLDER).iterdir()] == []


def test_a_board_that_was_closed_says_so_at_once() -> None:
    board = StoreBoard(TorchKeys(distributed().HashStore(), 1, silence=SECONDS * 100), "c/1")
    board.mark("a")
    board.close(given_up=False)
    with pytest.raises(UnreachableError, match="rank 1 has left"):
        board.mark("a")
