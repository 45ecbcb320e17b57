"""A partial plan writes what differs from another file of the same layout, by whole pages, and no more than it must."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates._base.sizes import CHUNK, DESCRIPTOR, DESCRIPTOR_CRC, LARGE_RECORD, PAGE
from datastates.container import zip_frames
from datastates.container.checksums import crc32_shift
from datastates.planning import write
from datastates.planning.partial import MOST_RANGES, PartialPlan, plan_partial
from datastates.planning.plans import WritePlan

BLOCK = 1 << 20
SIZES = st.sampled_from([0, 1, 64, 4096, 5000, LARGE_RECORD, CHUNK, CHUNK + 1, 3 * CHUNK, 2 * BLOCK + 77])


def plan_of(sizes: list[int], block: int = BLOCK) -> WritePlan:
    nbytes = np.array(sizes, np.uint64)
    return write.plan_write(nbytes, np.zeros(len(sizes), np.uint8), zip_frames.header_nbytes(len(sizes)), block)


def chunks_of(plan: WritePlan) -> list[tuple[int, int, int]]:
    """Record, begin and end of each chunk."""
    sizes = plan.source_nbytes[plan.order].tolist()
    return [
        (record, begin + at, begin + min(at + CHUNK, size))
        for record, (begin, size) in enumerate(zip(plan.data_offset.tolist(), sizes, strict=True))
        for at in range(0, size, CHUNK)
    ]


def file_of(plan: WritePlan, sources: list[bytes]) -> tuple[bytearray, bytes]:
    """The file of a plan, and its literal bytes without checksums."""
    data = bytearray(plan.end)
    records = [sources[i] for i in plan.order]
    is_data = np.zeros(plan.end, bool)
    for begin, source in zip(plan.data_offset.tolist(), records, strict=True):
        data[begin : begin + len(source)] = source
        is_data[begin : begin + len(source)] = True
    frames = np.where(is_data, 0, np.arange(plan.end) % 251).astype(np.uint8)
    for begin, source in zip(plan.data_offset.tolist(), records, strict=True):
        frames[begin + len(source) + DESCRIPTOR_CRC :][:4] = 0
    data = bytearray((np.frombuffer(data, np.uint8) | frames).tobytes())
    literal = frames[~is_data].tobytes()
    for begin, source in zip(plan.data_offset.tolist(), records, strict=True):
        at = begin + len(source) + DESCRIPTOR_CRC
        data[at : at + 4] = zlib.crc32(source).to_bytes(4, "little")
    return data, literal


def carry_out(partial: PartialPlan, base: bytes, literal: bytes, old: list[bytes], new: list[bytes]) -> bytearray:
    """What the executor does with a partial plan, over another file; ``old`` and ``new`` are records."""
    plan, made = partial.plan, bytearray(len(base))
    for offset, length in zip(*(x.tolist() for x in partial.shared), strict=True):
        assert offset % PAGE == length % PAGE == 0
        assert not any(made[offset : offset + length])
        made[offset : offset + length] = base[offset : offset + length]
    runs = [
        new[record][offset : offset + nbytes]
        for record, offset, nbytes in zip(
            partial.record.tolist(), partial.offset.tolist(), plan.source_nbytes.tolist(), strict=True
        )
    ]
    text = bytearray(literal)
    for at, record in zip(*(x.tolist() for x in partial.patch), strict=True):  # all but the runs
        known = bytearray(old[record])
        crc = zlib.crc32(known)
        for run, (r, offset) in enumerate(zip(partial.record.tolist(), partial.offset.tolist(), strict=True)):
            if r == record:
                was = known[offset : offset + len(runs[run])]
                after = len(known) - offset - len(was)
                crc ^= int(crc32_shift(np.array([zlib.crc32(was)], np.uint32), np.array([after], np.uint64))[0])
        text[at : at + 4] = crc.to_bytes(4, "little")
    extents = zip(plan.extent_offset.tolist(), plan.extent_length.tolist(), strict=True)
    for i, (offset, length) in enumerate(extents):
        assert offset % PAGE == 0
        assert length <= BLOCK
        filled = 0
        for k in range(int(plan.extent_piece[i]), int(plan.extent_piece[i + 1])):
            source, begin, n = (int(x[k]) for x in (plan.piece_source, plan.piece_source_offset, plan.piece_length))
            assert int(plan.piece_extent_offset[k]) == filled
            made[offset + filled : offset + filled + n] = (text if source < 0 else runs[source])[begin : begin + n]
            filled += n
        assert filled == length
    patches = (plan.patch_extent, plan.patch_offset, plan.patch_source, plan.patch_after)
    for extent, within, source, after in zip(*(x.tolist() for x in patches), strict=True):
        at = int(plan.extent_offset[extent]) + within
        crc = np.array([zlib.crc32(runs[source])], np.uint32)
        value = int.from_bytes(made[at : at + 4], "little") ^ int(crc32_shift(crc, np.array([after], np.uint64))[0])
        made[at : at + 4] = value.to_bytes(4, "little")
    return made


@settings(max_examples=60)
@given(st.lists(SIZES, max_size=9), st.data(), st.sampled_from([0, 1, 2, MOST_RANGES]))
def test_it_makes_the_new_file_over_the_old_one(sizes: list[int], data: st.DataObject, most: int) -> None:
    plan = plan_of(sizes)
    chunks = chunks_of(plan)
    changed = np.array(data.draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks))), bool)
    atomic = np.array(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))), bool)
    old = [np.random.default_rng(i).bytes(n) for i, n in enumerate(sizes)]
    base, literal = file_of(plan, old)
    new = [bytearray(old[i]) for i in plan.order]
    for record, begin, _ in (chunk for chunk, differs in zip(chunks, changed, strict=True) if differs):
        new[record][begin - int(plan.data_offset[record])] ^= 255
    by_source = [new[record] for record in np.argsort(plan.order)]
    expected, _ = file_of(plan, [bytes(one) for one in by_source])

    partial = plan_partial(plan, changed, atomic, BLOCK, most)
    assert carry_out(partial, bytes(base), literal, [old[i] for i in plan.order], new) == expected
    # a chunk is written if it differs, or if its record is written as a whole, or for its neighbours in a page
    for (record, begin, end), is_written, differs in zip(chunks, partial.written, changed, strict=True):
        of_record = [w for (r, _, _), w in zip(chunks, partial.written, strict=True) if r == record]
        assert not differs or is_written
        assert not atomic[record] or all(of_record) or not any(of_record)
        if (
            most == MOST_RANGES
            and is_written
            and not differs
            and not atomic[record]
            and end - begin == CHUNK
            and end % PAGE == 0
        ):
            assert sizes[plan.order[record]] < LARGE_RECORD, "nothing else lies in its pages"


def test_little_is_written_where_little_changes() -> None:
    plan = plan_of([40 * CHUNK, 30 * CHUNK + 5, 20 * CHUNK])
    changed = np.zeros(len(chunks_of(plan)), bool)
    changed[[3, 50]] = True
    written = plan_partial(plan, changed, np.zeros(3, bool), BLOCK)
    # the two, and the chunk whose last bytes share a page with the checksum of its record
    assert np.flatnonzero(written.written).tolist() == [3, 50, 70]
    assert int(written.plan.extent_length.sum()) < 3 * CHUNK + 6 * PAGE
    nothing = plan_partial(plan, np.zeros_like(changed), np.zeros(3, bool), BLOCK)
    assert not nothing.written.any()
    assert int(nothing.plan.extent_length.sum()) < PAGE + DESCRIPTOR
    assert sum(nothing.shared[1].tolist()) == plan.end // PAGE * PAGE


def test_the_longest_ranges_are_shared() -> None:
    plan = plan_of([400 * CHUNK])
    changed = np.zeros(400, bool)
    changed[[*range(2, 100, 3), 200, 300]] = True  # two chunks lie between most of those that change
    most = plan_partial(plan, changed, np.zeros(1, bool), BLOCK, 3)
    assert np.flatnonzero(~most.written).tolist() == [*range(99, 200), *range(201, 300), *range(301, 400)]
    assert len(most.shared[0]) == 3 + 1, "and the page before the data"
    assert len(plan_partial(plan, changed, np.zeros(1, bool), BLOCK).shared[0]) > 30


def test_small_records_that_share_pages_are_written_together() -> None:
    plan = plan_of([CHUNK, *[5000] * 1000])
    changed = np.zeros(len(chunks_of(plan)), bool)
    assert not plan_partial(plan, changed, np.zeros(1001, bool), BLOCK).written[0]
    changed[500] = True
    assert plan_partial(plan, changed, np.zeros(1001, bool), BLOCK).written[1:].all()


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_a_file_without_data_is_its_frame(sizes: list[int]) -> None:
    plan = plan_of(sizes)
    partial = plan_partial(plan, np.zeros(0, bool), np.zeros(len(sizes), bool), BLOCK)
    assert int(partial.plan.extent_length.sum()) == plan.end
    assert not len(partial.shared[0])
