"""A read plan reads and verifies what is wanted."""

from __future__ import annotations

import bisect
import itertools
import random
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from datastates._base.sizes import CHUNK, PAGE
from datastates.container import zip_frames
from datastates.planning import read, write
from datastates.planning.plans import ReadPlan
from datastates.planning.several import FileRanges, plan_several
from datastates.state.runs import Runs

BLOCK = 1 << 20


def read_plan(
    records: list[int],
    wanted: list[tuple[int, int, int]],
    *,
    whole: int = 0,
    in_place: int = 1,
    spare: int = 0,
    checked: bool = True,
) -> tuple[ReadPlan, np.ndarray]:
    """Plan to read ranges, each (record, begin in it, length), to destinations of their own.

    Returns the plan, and where each record begins in the file. Each chunk's checksum is its number; with
    ``checked=False`` no checksum is known.
    """
    sizes = np.array(records, np.uint64)
    order = write.plan_write(sizes, np.ones(len(sizes), np.uint8), zip_frames.header_nbytes(len(sizes)), BLOCK)
    assert (order.order == np.arange(len(sizes))).all(), "records are given largest first"
    chunk_count = int((-(-sizes.astype(np.int64) // CHUNK)).sum())
    crcs = np.arange(chunk_count if checked else 0, dtype=np.uint32)
    chunks = replace(read.plan_chunks(order.data_offset, sizes, crcs), checked=checked)
    record, begin, length = (np.array(column, np.int64) for column in zip(*wanted, strict=True))
    n = len(wanted)
    plan = read.plan_read(
        wanted=Runs.single(order.data_offset.astype(np.int64)[record] + begin, np.zeros(n, np.int64), length),
        dest=np.arange(n, dtype=np.int32),
        dest_nbytes=length.astype(np.uint64),
        in_place=np.full(n, in_place, np.uint8),
        whole=np.full(n, whole, np.uint8),
        chunks=chunks,
        extent_nbytes=8 * CHUNK,
        spare_nbytes=spare,
    )
    check_read(plan, order.data_offset.astype(np.int64)[record] + begin, length)
    return plan, order.data_offset.astype(np.int64)


def check_read(plan: ReadPlan, file_offset: np.ndarray, nbytes: np.ndarray) -> None:
    """Check a plan that reads each range to a destination of its own."""
    n = len(nbytes)
    check_plan(plan, np.arange(n), Runs.single(file_offset, np.zeros(n, np.int64), nbytes))


def stretches(
    offset: np.ndarray, length: np.ndarray, count: np.ndarray, step: np.ndarray
) -> list[list[tuple[int, int]]]:
    """The stretches of some of a plan's spans or pieces, each as its begin and end."""
    rows = zip(*(column.tolist() for column in (offset, length, count, step)), strict=True)
    return [[(at + i * apart, at + i * apart + each) for i in range(many)] for at, each, many, apart in rows]


def check_plan(plan: ReadPlan, dest: np.ndarray, ranges: Runs) -> None:
    """Check that every wanted byte comes from a span that is read, and that the plan's byte counts are true."""
    of, wanted_runs = ranges.stretches()
    of = dest[of]
    extent = plan.extent_offset.astype(np.int64)
    got = {d: np.full(int(n), -1) for d, n in enumerate(plan.dest_nbytes.tolist())}
    wanted, verified = np.zeros((2, int(ranges.end.max(initial=0)) + CHUNK), bool)
    for e in range(len(extent)):
        some = slice(int(plan.extent_span[e]), int(plan.extent_span[e + 1]))
        columns = plan.span_offset, plan.span_length, plan.span_count, plan.span_step
        spans = list(itertools.chain(*stretches(*(column[some] for column in columns))))
        assert spans[0][0] == 0
        assert spans[-1][1] == plan.extent_length[e] <= 8 * CHUNK
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        begins = [a for a, _ in spans]

        def is_read(at: int, n: int, spans: list[tuple[int, int]] = spans, begins: list[int] = begins) -> bool:
            a, b = spans[bisect.bisect_right(begins, at) - 1]
            return a <= at and at + n <= b

        some = slice(int(plan.extent_piece[e]), int(plan.extent_piece[e + 1]))
        here = plan.piece_extent_offset, plan.piece_length, plan.piece_count, plan.piece_extent_step
        there = plan.piece_dest_offset, plan.piece_length, plan.piece_count, plan.piece_dest_step
        assert (np.diff(plan.piece_extent_offset[some].astype(np.int64)) >= 0).all()
        froms, tos = (stretches(*(column[some] for column in columns)) for columns in (here, there))
        for d, fro, to in zip(plan.piece_dest[some].tolist(), froms, tos, strict=True):
            for (a, b), (c, _) in zip(fro, to, strict=True):
                assert is_read(a, b - a)
                assert (got[d][c : c + b - a] == -1).all()
                got[d][c : c + b - a] = np.arange(extent[e] + a, extent[e] + b)
        for c in range(int(plan.extent_check[e]), int(plan.extent_check[e + 1])):
            at, n = int(plan.check_offset[c]), int(plan.check_length[c])
            assert is_read(at, n)
            verified[extent[e] + at : extent[e] + at + n] = True
    expected = {d: np.full(int(n), -1) for d, n in enumerate(plan.dest_nbytes.tolist())}
    loose = set()
    for d, a, to, n in zip(
        *(c.tolist() for c in (of, wanted_runs.source, wanted_runs.dest, wanted_runs.length)), strict=True
    ):
        expected[d][to : to + n] = np.arange(a, a + n)
        wanted[a : a + n] = True
        if not verified[a : a + n].all():
            loose.add(d)
    assert all((got[d] == expected[d]).all() for d in got)
    assert plan.needed_nbytes == wanted.sum()
    assert plan.unverified_nbytes == (wanted & ~verified).sum()
    assert plan.unverified_dest.tolist() == sorted(loose)


def read_nbytes(plan: ReadPlan) -> int:
    return int((plan.span_length * plan.span_count).sum())


MIB = 1 << 20


def test_what_is_wanted_as_a_whole_is_verified_and_nothing_else_read() -> None:
    plan, _ = read_plan([2 * MIB, 2 * MIB - 77], [(0, 0, 2 * MIB), (1, 0, 2 * MIB - 77)])
    assert len(plan.check_crc) == 16
    assert plan.unverified_nbytes == 0
    assert read_nbytes(plan) == 4 * MIB - 77


def test_small_records_side_by_side_are_read_at_once_whatever_their_frames_take() -> None:
    plan, _ = read_plan([100] * 300, [(r, 0, 100) for r in range(300)])
    assert len(plan.extent_offset) == len(plan.span_offset) == 1
    assert len(plan.check_crc) == 300
    assert read_nbytes(plan) > 1.5 * plan.needed_nbytes


def test_small_records_with_others_between_are_read_alone() -> None:
    plan, _ = read_plan([1000] * 300, [(r, 0, 1000) for r in range(0, 300, 2)])
    assert len(plan.extent_offset) == 1
    assert len(plan.check_crc) == 150  # each is verified all the same
    assert read_nbytes(plan) <= (1 + 1 / read.WASTE) * plan.needed_nbytes
    plan, _ = read_plan([1000] * 300, [(r, 0, 1000) for r in range(0, 300, 2)], spare=MIB)
    assert len(plan.span_offset) == 1


def test_the_edges_of_a_range_are_verified_while_that_is_cheap() -> None:
    size = 20 * CHUNK
    plan, _ = read_plan([size], [(0, 4096, size - 8192)])  # 4096 bytes at each end
    assert plan.unverified_nbytes == 0
    assert read_nbytes(plan) == size
    plan, _ = read_plan([size], [(0, CHUNK - 64, size - CHUNK)])
    assert plan.unverified_nbytes == 64  # the chunk of which only 64 bytes are wanted is not verified
    assert len(plan.check_crc) == 19
    assert read_nbytes(plan) <= (1 + 1 / read.WASTE) * plan.needed_nbytes


def test_the_chunk_of_which_more_is_wanted_is_verified_first() -> None:
    wanted = [(0, 0, 8 * CHUNK), (1, 0, CHUNK - 8192), (1, CHUNK, 8192)]
    plan, _ = read_plan([8 * CHUNK, 2 * CHUNK], wanted, in_place=0)
    assert plan.unverified_dest.tolist() == [2]
    assert plan.unverified_nbytes == 8192


def test_columns_of_rows_are_read_alone() -> None:
    rows = [(0, r * 8192, 2048) for r in range(2048)]
    plan, _ = read_plan([2048 * 8192], rows)
    assert read_nbytes(plan) <= (1 + 1 / read.WASTE) * plan.needed_nbytes
    assert len(plan.extent_offset) < 20  # many stretches to an extent
    assert plan.unverified_nbytes > 0.9 * plan.needed_nbytes


def test_what_must_be_verified_is() -> None:
    plan, _ = read_plan([8 * CHUNK], [(0, 100, 100), (0, 5 * CHUNK - 1, 2)], whole=1)
    assert plan.unverified_nbytes == 0
    assert read_nbytes(plan) == 3 * CHUNK


def test_without_checksums_nothing_is_read_to_be_verified() -> None:
    plan, _ = read_plan([8 * CHUNK], [(0, 100, 100), (0, 5 * CHUNK - 1, 2)], whole=1, spare=MIB, checked=False)
    assert read_nbytes(plan) == plan.unverified_nbytes == 102
    plan, _ = read_plan([2 * MIB, 2 * MIB - 77], [(0, 0, 2 * MIB), (1, 0, 2 * MIB - 77)], checked=False)
    assert read_nbytes(plan) == plan.unverified_nbytes == 4 * MIB - 77
    plan, _ = read_plan([100] * 300, [(r, 0, 100) for r in range(300)], checked=False)
    assert len(plan.extent_offset) == len(plan.span_offset) == 1


def test_without_checksums_gaps_are_read_over_up_to_as_much_as_is_wanted() -> None:
    for pitch, spans in ((4096, 1), (8192, None)):
        plan, _ = read_plan([2048 * pitch], [(0, r * pitch, 2048) for r in range(2048)], checked=False)
        assert read_nbytes(plan) <= 2 * plan.needed_nbytes
        assert spans is None or len(plan.span_offset) < 20


@pytest.mark.parametrize("seed", range(30))
def test_any_ranges(seed: int) -> None:
    chance = random.Random(seed)
    records = sorted((chance.choice((0, 5, 100, 5000, 70_000, CHUNK, 3 * CHUNK + 5)) for _ in range(8)), reverse=True)
    wanted = []
    for _ in range(chance.randint(1, 60)):
        record = chance.randrange(8)
        begin = chance.randint(0, records[record])
        wanted.append(
            (record, begin, chance.randint(0, min(records[record] - begin, chance.choice((10, 100_000, MIB)))))
        )
    plan, _ = read_plan(records, wanted, in_place=seed % 2)
    assert plan.unverified_nbytes == 0 or read_nbytes(plan) <= (1 + 1 / read.WASTE) * plan.needed_nbytes + 8 * 4300
    plan, _ = read_plan(records, wanted, in_place=seed % 2, spare=8 * MIB)
    assert plan.unverified_nbytes == 0
    plan, _ = read_plan(records, wanted, in_place=seed % 2, spare=8 * MIB, checked=False)
    assert plan.unverified_nbytes == plan.needed_nbytes
    assert read_nbytes(plan) <= 2 * plan.needed_nbytes + 8 * 4300


# --- ranges with a stride
# -----------------------------------------------------------------------------------------

Rows = tuple[int, int, int, int, int, int]
"""A range with a stride: record, begin in it, length, count, step, and the step in the destination over its length."""


@st.composite
def records_and_rows(draw: st.DrawFn) -> tuple[list[int], list[Rows]]:
    records = draw(st.lists(st.sampled_from([5000, 70_000, CHUNK, 3 * CHUNK + 5, 9 * CHUNK]), min_size=1, max_size=4))
    records.sort(reverse=True)
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        record = draw(st.integers(0, len(records) - 1))
        begin = draw(st.integers(0, records[record] - 1))
        length = draw(st.sampled_from([1, 100, 512, 5000, 66_000]) | st.integers(1, 9000))
        step = length + draw(st.sampled_from([0, 1, 512, 4096, 70_000]) | st.integers(0, 9000))
        room = records[record] - begin
        length = min(length, room)
        count = draw(st.integers(1, min(1 + (room - length) // step, 400)))
        rows.append((record, begin, length, count, step, length + draw(st.sampled_from([0, 7]))))
    return records, rows


@pytest.mark.long
@given(records_and_rows(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_ranges_with_a_stride_are_read_as_their_stretches_are(
    made: tuple[list[int], list[Rows]], in_place: bool, whole: bool, checked: bool, shared: bool
) -> None:
    records, rows = made
    sizes = np.array(records, np.uint64)
    offset = write.plan_write(
        sizes, np.ones(len(sizes), np.uint8), zip_frames.header_nbytes(len(sizes)), BLOCK
    ).data_offset
    crcs = np.zeros(int((-(-sizes.astype(np.int64) // CHUNK)).sum()) if checked else 0, np.uint32)
    chunks = replace(read.plan_chunks(offset, sizes, crcs), checked=checked)
    record, begin, length, count, step, dest_step = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    room = (count - 1) * dest_step + length
    dest = np.arange(len(rows))
    runs = Runs(offset.astype(np.int64)[record] + begin, np.zeros(len(rows), np.int64), length, count, step, dest_step)
    if shared:  # all of them fill one destination, one behind the other
        runs = replace(runs, dest=np.cumsum(room) - room)
        dest, room = np.zeros(len(rows), np.int64), room.sum(keepdims=True)
    of, single = runs.stretches()
    plans = [
        read.plan_read(
            wanted=wanted,
            dest=to.astype(np.int32),
            dest_nbytes=room.astype(np.uint64),
            in_place=np.full(len(room), in_place, np.uint8),
            whole=np.full(len(room), whole, np.uint8),
            chunks=chunks,
            extent_nbytes=8 * CHUNK,
        )
        for wanted, to in ((runs, dest), (single, dest[of]))
    ]
    for plan in plans:
        check_plan(plan, dest, runs)
    strided, plain = plans
    gap = step - length
    narrow = int((gap * (count - 1))[gap <= np.maximum(PAGE - 1, length)].sum())
    if not narrow:
        assert strided.unverified_nbytes == plain.unverified_nbytes
        assert strided.unverified_dest.tolist() == plain.unverified_dest.tolist()
        assert strided.check_crc.tolist() == plain.check_crc.tolist()
        assert not strided.extent_shared.any()
    assert strided.shared_nbytes <= narrow
    assert not plain.extent_shared.any()
    expected = narrow + (1 + 1 / read.WASTE) * plain.needed_nbytes
    assert read_nbytes(strided) <= max(read_nbytes(plain), expected) or not checked


@pytest.mark.long
@given(st.lists(records_and_rows(), min_size=1, max_size=4), st.booleans(), st.booleans(), st.booleans())
def test_several_files_are_planned_at_once(
    made: list[tuple[list[int], list[Rows]]], in_place: bool, whole: bool, checked: bool
) -> None:
    files = []
    for number, (records, rows) in enumerate(made):
        sizes = np.array(records, np.uint64)
        placed = write.plan_write(sizes, np.ones(len(sizes), np.uint8), zip_frames.header_nbytes(len(sizes)), BLOCK)
        count = int((-(-sizes.astype(np.int64) // CHUNK)).sum()) if checked else 0
        chunks = read.plan_chunks(
            placed.data_offset, sizes, np.arange(count, dtype=np.uint32) + np.uint32(number << 20)
        )
        record, begin, length, times, step, dest_step = (np.array(c, np.int64) for c in zip(*rows, strict=True))
        source = placed.data_offset.astype(np.int64)[record] + begin
        files.append(
            FileRanges(
                nbytes=placed.end,
                wanted=Runs(source, np.zeros(len(rows), np.int64), length, times, step, dest_step),
                dest=np.arange(len(rows), dtype=np.int32),
                dest_nbytes=((times - 1) * dest_step + length).astype(np.uint64),
                in_place=np.full(len(rows), in_place, np.uint8),
                whole=np.full(len(rows), whole, np.uint8),
                chunks=replace(chunks, checked=checked),
            )
        )
    plans = plan_several(files, 8 * CHUNK)
    for file, plan in zip(files, plans, strict=True):
        check_plan(plan, file.dest, file.wanted)
        assert plan.dest_nbytes is file.dest_nbytes
        extent = np.repeat(plan.extent_offset, np.diff(plan.extent_check.astype(np.int64)))
        chunk = np.searchsorted(file.chunks.offset, extent + plan.check_offset)
        assert (file.chunks.record[chunk] == plan.check_record).all()
        assert (file.chunks.crc[chunk] == plan.check_crc).all()
    columns = [name.name for name in fields(FileRanges) if name.name != "nbytes"]
    alone = read.plan_read(**{name: getattr(files[0], name) for name in columns}, extent_nbytes=8 * CHUNK)
    (same,) = plan_several(files[:1], 8 * CHUNK)
    assert all(np.array_equal(getattr(alone, f.name), getattr(same, f.name)) for f in fields(ReadPlan))


def test_several_files_have_one_budget() -> None:
    """What one file leaves of it, another one may need to be verified."""
    size = 20 * CHUNK
    chunks = read.plan_chunks(np.zeros(1, np.uint64), np.array([size], np.uint64), np.zeros(20, np.uint32))
    ones = np.ones(1, np.uint8)
    files = [
        FileRanges(
            nbytes=size,
            wanted=Runs.single(np.array([begin]), np.array([0]), np.array([size - begin])),
            dest=np.zeros(1, np.int32),
            dest_nbytes=np.array([size - begin], np.uint64),
            in_place=ones,
            whole=ones * np.uint8(0),
            chunks=chunks,
        )
        for begin in (0, CHUNK - 4096)
    ]
    assert [plan_several([file], 8 * CHUNK)[0].unverified_nbytes for file in files] == [0, 4096]
    assert [plan.unverified_nbytes for plan in plan_several(files, 8 * CHUNK)] == [0, 0]
    assert plan_several([], 8 * CHUNK) == []


def columns_of_a_matrix(
    pitch: int, *widths: int, begin: int | None = None, rows: int | None = None, copies: int = 1
) -> ReadPlan:
    """A plan for columns of 16 MiB, some destinations for each width: the last of a row, or those from ``begin`` on."""
    size = np.array([64 * CHUNK], np.uint64)
    chunks = read.plan_chunks(size * np.uint64(0), size, np.zeros(64, np.uint32))
    width = np.array(widths)
    count = np.full(len(width), rows or 64 * CHUNK // pitch)
    first = (pitch - width.sum() if begin is None else begin) + np.cumsum(width) - width
    width, count, first = (np.repeat(column, copies) for column in (width, count, first))
    runs = Runs(first, count * 0, width, count, count * 0 + pitch, width)
    dest, nbytes, ones = np.arange(len(width), dtype=np.int32), (count * width).astype(np.uint64), np.ones_like(width)
    plan = read.plan_read(runs, dest, nbytes, ones.astype(np.uint8), np.zeros(len(width), np.uint8), chunks, 8 * CHUNK)
    check_plan(plan, dest, runs)
    # a few for each chunk or extent, not one for each row
    assert len(plan.span_length) + len(plan.piece_dest) < 150 * len(width) or rows is not None
    return plan


def test_columns_far_apart_are_read_alone() -> None:
    plan = columns_of_a_matrix(16384, 4096)
    assert read_nbytes(plan) <= (1 + 1 / read.WASTE) * plan.needed_nbytes
    assert plan.unverified_nbytes > 0.9 * plan.needed_nbytes
    assert not plan.extent_shared.any()


@pytest.mark.parametrize(("pitch", "width"), [(1024, 512), (4096, 1024), (16384, 8192)])
def test_columns_with_narrow_gaps_are_read_in_whole_chunks_that_ranks_share(pitch: int, width: int) -> None:
    plan = columns_of_a_matrix(pitch, width)
    assert read_nbytes(plan) == 64 * CHUNK
    assert plan.unverified_nbytes == 0
    assert plan.extent_shared.all()


@pytest.mark.parametrize("pitch", [4096, 16384])
def test_columns_that_go_to_several_destinations_are_read_like_the_rows_that_they_make_up(pitch: int) -> None:
    quarter = pitch // 4
    plan = columns_of_a_matrix(pitch, quarter, quarter, quarter, quarter)
    assert read_nbytes(plan) == 64 * CHUNK
    assert plan.unverified_nbytes == 0
    assert not plan.extent_shared.any()
    three = columns_of_a_matrix(pitch, quarter, quarter, quarter)
    assert read_nbytes(three) == 64 * CHUNK
    assert three.unverified_nbytes == 0
    assert three.extent_shared.all()


@pytest.mark.long
@pytest.mark.parametrize("widths", [(2048,), (1024, 1024), (1024, 3072)])
def test_columns_that_several_destinations_get_alike_are_read_like_those_of_one(widths: tuple[int, ...]) -> None:
    plan, alone = (columns_of_a_matrix(4096, *widths, copies=copies) for copies in (3, 1))
    assert read_nbytes(plan) == read_nbytes(alone)
    assert plan.extent_shared.tolist() == alone.extent_shared.tolist()
    assert len(plan.piece_dest) == 3 * len(alone.piece_dest)


@pytest.mark.long
@given(
    st.integers(100, 200_000),
    st.lists(st.integers(1, 70_000), min_size=2, max_size=5),
    st.integers(0, 50_000),
    st.integers(1, 300),
    st.integers(1, 3),
)
def test_any_columns_that_go_to_several_destinations(
    pitch: int, widths: list[int], begin: int, rows: int, copies: int
) -> None:
    columns = list(itertools.takewhile(lambda end: end <= pitch, itertools.accumulate(widths)))
    assume(columns)
    rows = min(rows, (64 * CHUNK - begin) // pitch)
    plan = columns_of_a_matrix(pitch, *widths[: len(columns)], begin=begin, rows=rows, copies=copies)
    assert plan.needed_nbytes == columns[-1] * rows
