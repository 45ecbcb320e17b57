"""Ranks enter the same round, whatever failed before on some of them; over a store in memory and JAX's service."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from interrupts import Interrupt, Tracer
from memory_keys import Memory, MemoryKeys

from datastates._base import waiting
from datastates.errors import RanksMissingError
from datastates.ranks import store_board
from datastates.ranks.jax_keys import JaxKeys
from datastates.ranks.keys import Keys
from datastates.ranks.store_board import Rounds

SECONDS = 20.0
TRACED = (store_board.__file__, waiting.__file__)
Later = Callable[[Callable[[], int]], "Future[int]"]
_runs = itertools.count()


class Rank:
    """One rank's rounds of a run."""

    def __init__(self, keys: Keys, name: str) -> None:
        self.keys = keys
        self.rounds = Rounds(name)

    def open(self, timeout: float = SECONDS) -> int:
        return self.rounds.enter(self.rounds.queue(), self.keys, timeout, 0.01)

    def end(self, number: int, *, given_up: bool = False) -> None:
        self.rounds.end(self.keys, number, given_up)


@pytest.fixture(params=["memory", "jax"])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    name = f"run {next(_runs)}"
    made: list[Rank]
    if request.param == "jax":
        service = request.getfixturevalue("coordination").service
        made = [Rank(JaxKeys(service, number, silence=SECONDS), name) for number in range(3)]
    else:
        memory = Memory()
        made = [Rank(MemoryKeys(memory, number), name) for number in range(3)]
    yield made
    for rank in made:
        rank.keys.close()


@pytest.fixture
def later() -> Iterator[Later]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def test_all_come_to_the_same_whoever_is_first(ranks: list[Rank], later: Later) -> None:
    for _ in range(3):
        early = later(ranks[1].open)
        number = ranks[0].open()
        assert (early.result(SECONDS), ranks[2].open()) == (number, number)


def test_several_stand_at_once_and_are_entered_in_order(ranks: list[Rank]) -> None:
    numbers = [ranks[0].open(), ranks[0].open()]
    assert [ranks[1].open(), ranks[1].open()] == numbers
    for number in numbers:
        ranks[0].end(number)
    third = ranks[0].open()
    assert [ranks[1].open(), ranks[2].open()] == [third, third]
    assert list(ranks[0].rounds._standing) == [third]


def test_a_rank_that_comes_late_enters_what_rank_0_has_closed(ranks: list[Rank]) -> None:
    first = ranks[0].open()
    ranks[0].end(first)
    assert [ranks[1].open(), ranks[2].open()] == [first, first]


def test_what_rank_0_has_given_up_is_entered_by_nobody(ranks: list[Rank]) -> None:
    first = ranks[0].open()
    assert ranks[1].open() == first
    ranks[0].end(first, given_up=True)
    with pytest.raises(RanksMissingError):
        ranks[2].open(timeout=0.1)
    second = ranks[0].open()
    assert [ranks[1].open(), ranks[2].open()] == [second, second]


def test_what_rank_0_has_left_for_another_is_entered_by_nobody(ranks: list[Rank]) -> None:
    first = ranks[0].open()
    assert ranks[1].open() == first
    ranks[0].end(first)
    second = ranks[0].open()
    assert [ranks[1].open(), ranks[2].open()] == [second, second]
    with pytest.raises(RanksMissingError, match=r"run \d+: rank 0 did not open it within 0\.1 s") as caught:
        ranks[2].open(timeout=0.1)
    assert caught.value.ranks == (0,)


def test_what_a_rank_has_left_it_does_not_enter_again(ranks: list[Rank], later: Later) -> None:
    first = ranks[0].open()
    assert ranks[1].open() == first  # and it runs out of time there, while rank 0 still waits
    again = later(ranks[1].open)
    ranks[0].end(first)
    second = ranks[0].open()
    assert again.result(SECONDS) == second > first


def test_who_has_waited_in_vain_is_in_nobodys_way(ranks: list[Rank]) -> None:
    with pytest.raises(RanksMissingError):
        ranks[1].open(timeout=0.01)
    assert ranks[0].open() == ranks[1].open() == ranks[2].open()


def test_calls_have_their_places_when_they_are_made(ranks: list[Rank], later: Later) -> None:
    rank = ranks[1]
    first, second = rank.rounds.queue(), rank.rounds.queue()
    waiting = later(lambda: rank.rounds.enter(second, rank.keys, SECONDS, 0.01))
    numbers = [ranks[0].open(), ranks[0].open()]
    assert rank.rounds.enter(first, rank.keys, SECONDS, 0.01) == numbers[0]
    assert waiting.result(SECONDS) == numbers[1]


def test_who_leaves_the_line_lets_the_next_one_in(ranks: list[Rank]) -> None:
    rank = ranks[1]
    rank.rounds.queue().leave()
    turn = rank.rounds.queue()
    turn.leave()
    turn.leave()
    assert ranks[0].open() == rank.open()


def test_a_call_that_is_interrupted_before_it_enters_is_in_nobodys_way(ranks: list[Rank]) -> None:
    rank = ranks[1]
    rank.rounds.queue()  # and nobody has it
    assert ranks[0].open() == rank.open(timeout=1)


def test_what_rank_0_has_begun_and_dropped_stands_until_it_begins_the_next(later: Later) -> None:
    memory, name = Memory(), "run"
    first, other = (Rank(MemoryKeys(memory, number), name) for number in range(2))
    number = first.open()
    first.keys = MemoryKeys(memory, 0)  # nobody has those of the interrupted call
    waiting = later(other.open)
    assert waiting.result(SECONDS) == number  # it waits there in vain
    assert first.open() == other.open() == number + 1
    assert list(first.rounds._standing) == [number + 1]


@pytest.mark.parametrize("which", [0, 1])
def test_an_interrupt_at_any_line_leaves_the_rounds_usable(which: int) -> None:
    memory = Memory()
    ranks = [Rank(MemoryKeys(memory, number), "run") for number in range(2)]

    def opened(number: int) -> int:
        ranks[number].keys = MemoryKeys(memory, number)  # each call makes its own
        return ranks[number].open(timeout=1)

    for line in itertools.count():
        begun = opened(0) if which == 1 else None
        tracer = Tracer(line, TRACED)
        with contextlib.suppress(Interrupt), tracer.tracing():
            opened(which)
        if begun is not None:
            ranks[0].end(begun, given_up=True)  # it has waited in vain
        assert opened(0) == opened(1), line
        assert ranks[which].rounds._line == []
        if not tracer.place:
            break
    assert line > 15
