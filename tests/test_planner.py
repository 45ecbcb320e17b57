"""Whatever the sizes, a plan writes every byte of every record to its place, once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datastates import frames, planner
from datastates.plan import CHUNK, DESCRIPTOR, DESCRIPTOR_CRC, PAGE

BLOCK = 1 << 20
# with a block's bytes less a header's, a cut falls on, just before and just after a checksum and a record's begin
SIZES = st.sampled_from([0, 1, 63, 64, 4096, 70_000, BLOCK, 3 * BLOCK]) | st.integers(BLOCK - 4300, BLOCK + 40)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=12))
def test_pieces_make_the_file(shards: list[tuple[int, bool]]) -> None:
    sizes = np.array([n for n, _ in shards], np.uint64)
    eager = np.array([e for _, e in shards], np.uint8)
    plan = planner.plan_write(sizes, eager, frames.header_nbytes(len(sizes)), BLOCK)
    offset, length = plan.extent_offset.astype(np.int64), plan.extent_length.astype(np.int64)
    assert (np.concatenate(([0], offset + length))[:-1] == offset).all()
    assert int(length.sum()) == plan.end
    assert (length <= BLOCK).all()
    assert (offset % PAGE == 0).all()

    # each byte as (source, place in it): what the pieces put there, and what must be there
    extent = np.repeat(np.arange(len(offset)), np.diff(plan.extent_piece.astype(np.int64)))
    begin = offset[extent] + plan.piece_extent_offset.astype(np.int64)
    end = begin + plan.piece_length.astype(np.int64)
    assert (end > begin).all()
    assert (np.append(begin, plan.end) == np.append(0, end)).all() or not len(begin)
    assert (end <= offset[extent] + length[extent]).all()
    for piece in range(len(begin)):
        source, within = int(plan.piece_source[piece]), int(plan.piece_source_offset[piece])
        if source >= 0:
            record = plan.order.tolist().index(source)
            assert begin[piece] - within == int(plan.data_offset[record])
            assert within + int(plan.piece_length[piece]) <= int(sizes[source])
        else:
            stretch = int(np.searchsorted(plan.literal_offset, begin[piece], side="right")) - 1
            before = int(plan.literal_length[:stretch].sum())
            assert within - before == begin[piece] - int(plan.literal_offset[stretch])
            assert within + int(plan.piece_length[piece]) <= before + int(plan.literal_length[stretch])
    checksum = (plan.data_offset + sizes[plan.order]).astype(np.int64) + DESCRIPTOR_CRC
    where = plan.patch_extent.astype(np.int64)
    assert (offset[where] + plan.patch_offset.astype(np.int64) == checksum).all()
    assert (checksum + 4 <= offset[where] + length[where]).all()
    assert plan.end == (int(checksum[-1]) - DESCRIPTOR_CRC + DESCRIPTOR if len(sizes) else 0)


def test_records_that_go_to_a_device_share_extents() -> None:
    sizes = np.full(4, 3 * CHUNK, np.uint64)
    offset = np.arange(4, dtype=np.uint64) * np.uint64(3 * CHUNK + 4096)
    chunks = planner.plan_chunks(offset, sizes, np.zeros(12, np.uint32))
    extents = {}
    for in_place in (0, 1):
        plan = planner.plan_read(
            file_offset=offset,
            nbytes=sizes,
            dest=np.arange(4, dtype=np.int32),
            dest_offset=np.zeros(4, np.uint64),
            dest_nbytes=sizes,
            in_place=np.full(4, in_place, np.uint8),
            chunks=chunks,
            extent_nbytes=32 * CHUNK,
        )
        assert plan.piece_length.sum() == sizes.sum()
        extents[in_place] = plan.extent_length.tolist()
    assert extents == {0: [4 * 3 * CHUNK + 3 * 4096], 1: [3 * CHUNK] * 4}
