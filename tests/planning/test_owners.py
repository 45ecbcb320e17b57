"""Which of several replicas writes: all ranks get the same answer, and no rank writes much more than its share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.planning.write import owners

SETS = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True).map(lambda ranks: tuple(sorted(ranks)))
PARTS = st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 1000), SETS), max_size=40).map(
    lambda found: [(key, nbytes, replicas) for key, (nbytes, replicas) in found.items()]
)


@given(PARTS, st.randoms(use_true_random=False))
def test_one_of_the_replicas_writes_whatever_the_order(
    parts: list[tuple[str, int, tuple[int, ...]]], r: random.Random
) -> None:
    expected = dict(zip([key for key, _, _ in parts], owners(parts), strict=True))
    assert all(expected[key] in replicas for key, _, replicas in parts)
    r.shuffle(parts)
    assert dict(zip([key for key, _, _ in parts], owners(parts), strict=True)) == expected


@given(PARTS, PARTS, SETS)
def test_other_sets_of_replicas_make_no_difference(
    parts: list[tuple[str, int, tuple[int, ...]]],
    others: list[tuple[str, int, tuple[int, ...]]],
    ranks: tuple[int, ...],
) -> None:
    mine = [(key, nbytes, ranks) for key, nbytes, _ in parts]
    more = [part for part in others if part[2] != ranks]
    assert owners(more + mine)[len(more) :] == owners(mine)


@given(PARTS, SETS)
def test_no_rank_writes_much_more_than_its_share(
    parts: list[tuple[str, int, tuple[int, ...]]], ranks: tuple[int, ...]
) -> None:
    mine = [(key, nbytes, ranks) for key, nbytes, _ in parts]
    loads = dict.fromkeys(ranks, 0)
    for (_, nbytes, _), owner in zip(mine, owners(mine), strict=True):
        loads[owner] += nbytes
    largest = max((nbytes for _, nbytes, _ in mine), default=0)
    assert max(loads.values()) <= sum(loads.values()) / len(ranks) + largest


def test_equal_parts_go_round_by_key_and_rank() -> None:
    parts = [("c", 4, (2, 5)), ("a", 4, (2, 5)), ("b", 4, (2, 5)), ("large", 9, (2, 5)), ("other", 1, (5, 7))]
    assert owners(parts) == [5, 5, 5, 2, 5]


def test_ranks_are_taken_in_any_order() -> None:
    assert owners([("a", 4, (5, 2)), ("b", 4, (2, 5))]) == [2, 5]


def test_a_part_that_nobody_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="'lost'"):
        owners([("lost", 4, ())])
