"""Dividing rows among ranks: every byte is read by one rank, and gets where it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.planning import dividing
from datastates.planning.dividing import Rows, Share
from datastates.state.runs import Runs

RECORD = 1 << 16
"""Distance of the records of a test's files in bytes."""


def columns(record: int, pitch: int, begin: int, width: int, count: int, dest: int = 0) -> Rows:
    """Columns of a matrix that begins with a record."""
    numbers = (record * RECORD + begin, dest, width, count, pitch, width)
    return Rows(np.array([record]), Runs(*(np.array([n], np.int64) for n in numbers)))


def joined(rows: Sequence[Rows]) -> Rows:
    """All rows, each to a place of its own in one destination."""
    runs = Runs.joined([one.runs for one in rows])
    dest = np.cumsum(runs.size) - runs.size
    runs = Runs(runs.source, dest, runs.length, runs.count, runs.source_step, runs.dest_step)
    return Rows(np.concatenate([one.record for one in rows]), runs)


def moves(runs: Runs) -> list[tuple[int, int]]:
    """For each byte of some runs, where it is in the file and where it goes to."""
    _, single = runs.stretches()
    rows = zip(single.source.tolist(), single.dest.tolist(), single.length.tolist(), strict=True)
    return [(source + i, dest + i) for source, dest, n in rows for i in range(n)]


matrices = st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 20))
"""Rows of a matrix, the widths of some columns, and the width of what lies behind them."""


@st.composite
def wishes(draw: st.DrawFn) -> list[dict[str, Rows]]:
    ranks = draw(st.integers(1, 5))
    found: list[dict[str, list[Rows]]] = [{} for _ in range(ranks)]
    for file in draw(st.sets(st.sampled_from("abc"))):
        for record, (count, widths, rest) in enumerate(draw(st.lists(matrices, max_size=4))):
            begin = np.cumsum([0, *widths]).tolist()
            for rank in range(ranks):
                for n in draw(st.sets(st.integers(0, len(widths) - 1))):
                    rows = columns(record, sum(widths) + rest, begin[n], widths[n], count)
                    found[rank].setdefault(file, []).append(rows)
    return [{file: joined(rows) for file, rows in one.items()} for one in found]


@given(wishes())
def test_what_a_rank_wants_of_common_records_it_gets_once(wanted: list[dict[str, Rows]]) -> None:
    division = dividing.divide(wanted)
    for one in wanted:
        got: dict[str, list[tuple[int, int]]] = {}
        for share in division.shares:
            for file, parcel in dividing.parcels(one, share).items():
                assert (one[file].record[parcel.which] == parcel.parts.source // RECORD).all()
                got.setdefault(file, []).extend(moves(parcel.parts))
        for file, rows in one.items():
            expected = moves(rows.runs[np.isin(rows.record, division.records.get(file, []))])
            assert sorted(got.get(file, [])) == sorted(expected)


@given(wishes())
def test_what_is_sent_lies_end_to_end(wanted: list[dict[str, Rows]]) -> None:
    for share in dividing.divide(wanted).shares:
        for one in wanted:
            parcels = dividing.parcels(one, share).values()
            begin = [at for parcel in parcels for at in parcel.begin.tolist()]
            size = [n for parcel in parcels for n in parcel.parts.size.tolist()]
            assert begin == (np.cumsum(size) - size).tolist()


@given(wishes())
def test_both_ends_see_the_same_parcel(wanted: list[dict[str, Rows]]) -> None:
    for share in dividing.divide(wanted).shares:
        for one in wanted:
            told = dividing.decode(dividing.encode(one))
            here, there = dividing.parcels(one, share), dividing.parcels(told, share)
            assert here.keys() == there.keys()
            for file, parcel in here.items():
                assert parcel.parts.source.tolist() == there[file].parts.source.tolist()
                assert parcel.parts.size.tolist() == there[file].parts.size.tolist()
                assert parcel.begin.tolist() == there[file].begin.tolist()


def nbytes(share: Mapping[str, Share]) -> int:
    return sum(int((part.high - part.low).sum()) for part in share.values())


def test_the_shares_are_equal_and_each_lies_in_few_files() -> None:
    half = {file: joined([columns(r, 64, 0, 32, 1000) for r in range(4)]) for file in "ab"}
    other = {file: joined([columns(r, 64, 32, 32, 1000) for r in range(4)]) for file in "ab"}
    division = dividing.divide([half, other])
    assert [list(share) for share in division.shares] == [["a"], ["b"]]
    assert [nbytes(share) for share in division.shares] == [4 * 64_000, 4 * 64_000]


def test_a_record_is_divided_between_rows() -> None:
    wanted = [{"a": columns(0, 60, begin, 20, 100)} for begin in (0, 20, 40)]
    shares = [share["a"] for share in dividing.divide(wanted).shares]
    assert [(s.low.tolist(), s.high.tolist()) for s in shares] == [([0], [1980]), ([1980], [3960]), ([3960], [6000])]


def test_what_one_rank_wants_alone_stays_with_it() -> None:
    wanted = [{"a": columns(0, 64, 0, 32, 100), "b": columns(0, 64, 0, 32, 10)}, {"a": columns(1, 64, 0, 32, 100)}]
    division = dividing.divide(wanted)
    assert division.records == {}
    assert division.shares == [{}, {}]


def test_each_set_of_ranks_divides_what_it_wants_together() -> None:
    wanted = [
        {"a": joined([columns(r, 64, 32 * (rank % 2), 32, 100) for r in records])}
        for rank, records in enumerate([(0, 2), (0, 2), (1, 2), (1, 2)])
    ]
    shares = [share["a"] for share in dividing.divide(wanted).shares]
    records = [(share.low // RECORD).tolist() for share in shares]
    assert records == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert [nbytes({"a": share}) for share in shares] == pytest.approx([3200 + 1600] * 4, rel=0.02)


@pytest.mark.parametrize(
    ("pitch", "width", "ranks", "divided"),
    [
        (4096, 1024, 2, True),  # the gaps are shorter than a page
        (40_000, 10_000, 1, False),
        (40_000, 10_000, 2, True),  # together they want half
        (40_000, 10_000, 4, True),
        (80_000, 10_000, 3, False),
    ],
)
def test_rows_of_which_most_lies_between_are_not_divided(pitch: int, width: int, ranks: int, divided: bool) -> None:
    """Each rank would read, and verify, what none of them wants."""
    wanted = [{"a": columns(0, pitch, width * rank, width, 30)} for rank in range(ranks)]
    twice = [*wanted, *wanted] if ranks > 1 else wanted  # ranks that want the same rows
    for one in (wanted, twice):
        assert bool(dividing.divide(one).records) is divided
