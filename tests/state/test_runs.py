"""Ranges with a stride stand for their stretches, one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datastates.state.runs import Runs, spread

RUN = st.tuples(
    st.integers(0, 50), st.integers(0, 50), st.integers(1, 9), st.integers(1, 6), st.integers(0, 9), st.integers(0, 9)
)


def runs_of(rows: list[tuple[int, ...]]) -> Runs:
    source, dest, length, count, gap, dest_gap = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    single = count == 1
    return Runs(source, dest, length, count, length + np.where(single, 0, gap), length + np.where(single, 0, dest_gap))


def pairs(which: np.ndarray, runs: Runs) -> list[tuple[int, int, int]]:
    """Each element: the number of its run, and its places in source and destination."""
    of, single = runs.stretches()
    columns = (c.tolist() for c in (which[of], single.source, single.dest, single.length))
    return [(w, s + i, d + i) for w, s, d, n in zip(*columns, strict=True) for i in range(n)]


@given(st.lists(RUN, min_size=1, max_size=5), st.integers(0, 80), st.integers(1, 80))
def test_what_lies_within_a_range(rows: list[tuple[int, ...]], low: int, length: int) -> None:
    runs, high = runs_of(rows), low + length
    runs = runs[(runs.source < high) & (runs.end > low)]
    every = np.arange(len(runs))
    which, found = runs.within(np.full(len(runs), low), np.full(len(runs), high))
    assert sorted(pairs(which, found)) == sorted(p for p in pairs(every, runs) if low <= p[1] < high)
    assert (np.bincount(which, minlength=1) <= 3).all()
    assert ((found.count > 1) | ((found.source_step == found.length) & (found.dest_step == found.length))).all()


@given(st.lists(RUN, min_size=1, max_size=5))
def test_what_is_filled(rows: list[tuple[int, ...]]) -> None:
    runs = runs_of(rows)
    which, begin, end = runs.filled()
    filled = [(w, i) for w, b, e in zip(which.tolist(), begin.tolist(), end.tolist(), strict=True) for i in range(b, e)]
    assert sorted(filled) == sorted((w, d) for w, _, d in pairs(np.arange(len(runs)), runs))
    assert len(which) == sum(
        1 if s == n else c for n, c, s in zip(runs.length, runs.count, runs.dest_step, strict=True)
    )
    assert runs.size.sum() == len(filled)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 60)), max_size=3), st.integers(1, 9))
def test_stretches_at_all_indices(dims: list[tuple[int, int, int]], length: int) -> None:
    sizes, steps, dest_steps = ([d[i] for d in dims] for i in range(3))
    runs = spread(sizes, steps, dest_steps, length, 5, 6)
    _, single = runs.stretches()
    expected = [(5 + int(np.dot(at, steps)), 6 + int(np.dot(at, dest_steps))) for at in np.ndindex(*sizes)]
    assert list(zip(single.source.tolist(), single.dest.tolist(), strict=True)) == expected
    assert (single.length == length).all()
    assert ((runs.count == 1) | (np.minimum(runs.source_step, runs.dest_step) >= length)).all()


def test_rows_of_whole_planes_are_one_run() -> None:
    assert spread([3, 4], [40, 10], [20, 5], 5, 0, 0).count.tolist() == [12]
    assert spread([3, 4], [41, 10], [20, 5], 5, 0, 0).count.tolist() == [4, 4, 4]
    assert spread([3, 4], [40, 10], [20, 5], 6, 0, 0).count.tolist() == [1] * 12  # they overlap


STRETCH = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
"""The gaps before it in source and destination, and its length."""


@given(st.lists(st.tuples(STRETCH, st.integers(1, 5)), max_size=6))
def test_regular_stretches_become_runs_and_stay_the_same(rows: list[tuple[tuple[int, int, int], int]]) -> None:
    each = [stretch for stretch, times in rows for _ in range(times)]
    gap, dest_gap, length = (np.array([s[i] for s in each], np.int64) for i in range(3))
    before = np.cumsum(length) - length
    single = Runs.single(np.cumsum(gap) + before, np.cumsum(dest_gap) + before, length)
    regular = single.regular()
    _, stretches = regular.stretches()
    for name in ("source", "dest", "length"):
        assert getattr(stretches, name).tolist() == getattr(single, name).tolist()
    # each list entry makes one run, and what lies at its borders at most one more
    assert len(regular) <= 2 * len(rows)


def test_the_rows_of_boxes_become_one_run_each() -> None:
    boxes = [spread([4], [10], [3], 3, begin, dest) for begin, dest in ((0, 0), (100, 12), (150, 24))]
    _, single = Runs.joined(boxes).stretches()
    ragged = Runs.joined([Runs.single(*(np.array([n]) for n in (-5, -2, 2))), single])
    assert ragged.regular().count.tolist() == [1, 4, 4, 4]
