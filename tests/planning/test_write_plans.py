"""A write plan puts every byte of every record in its place once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datastates._base.sizes import CHUNK, DESCRIPTOR, DESCRIPTOR_CRC, PAGE
from datastates.container import zip_frames
from datastates.planning import read, write
from datastates.state.runs import Runs

BLOCK = 1 << 20
# sizes near a block less a header put cuts on, just before and just after a checksum and a record's begin
SIZES = st.sampled_from([0, 1, 63, 64, 4096, 70_000, BLOCK, 3 * BLOCK]) | st.integers(BLOCK - 4300, BLOCK + 40)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=12))
def test_pieces_make_the_file(shards: list[tuple[int, bool]]) -> None:
    sizes = np.array([n for n, _ in shards], np.uint64)
    eager = np.array([e for _, e in shards], np.uint8)
    plan = write.plan_write(sizes, eager, zip_frames.header_nbytes(len(sizes)), BLOCK)
    offset, length = plan.extent_offset.astype(np.int64), plan.extent_length.astype(np.int64)
    assert (np.concatenate(([0], offset + length))[:-1] == offset).all()
    assert int(length.sum()) == plan.end
    assert (length <= BLOCK).all()
    assert (offset % PAGE == 0).all()

    # the pieces leave no gap, and each takes its bytes from the right place of its source
    extent = np.repeat(np.arange(len(offset)), np.diff(plan.extent_piece.astype(np.int64)))
    begin = offset[extent] + plan.piece_extent_offset.astype(np.int64)
    end = begin + plan.piece_length.astype(np.int64)
    assert (end > begin).all()
    assert (np.append(begin, plan.end) == np.append(0, end)).all() or not len(begin)
    assert (end <= offset[extent] + length[extent]).all()
    literal = np.append(0, (plan.data_offset + sizes[plan.order]).astype(np.int64))
    between = np.append(plan.data_offset.astype(np.int64), plan.end) - literal
    for piece in range(len(begin)):
        source, within = int(plan.piece_source[piece]), int(plan.piece_source_offset[piece])
        if source >= 0:
            record = plan.order.tolist().index(source)
            assert begin[piece] - within == int(plan.data_offset[record])
            assert within + int(plan.piece_length[piece]) <= int(sizes[source])
        else:
            stretch = int(np.searchsorted(literal, begin[piece], side="right")) - 1
            before = int(between[:stretch].sum())
            assert within - before == begin[piece] - int(literal[stretch])
            assert within + int(plan.piece_length[piece]) <= before + int(between[stretch])
    checksum = (plan.data_offset + sizes[plan.order]).astype(np.int64) + DESCRIPTOR_CRC
    where = plan.patch_extent.astype(np.int64)
    assert (offset[where] + plan.patch_offset.astype(np.int64) == checksum).all()
    assert (checksum + 4 <= offset[where] + length[where]).all()
    assert plan.end == (int(checksum[-1]) - DESCRIPTOR_CRC + DESCRIPTOR if len(sizes) else 0)


@given(st.lists(SIZES, max_size=12).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(len(n))))))
def test_dense_pieces_make_the_file(drawn: tuple[list[int], list[int]]) -> None:
    sizes, order = drawn
    header = 1000
    plan = write.plan_dense_write(np.array(sizes, np.uint64), order, header, BLOCK)
    file: list[tuple[int, int, int]] = []  # stretches of the file: source, offset in it, length
    for extent in range(len(plan.extent_offset)):
        assert int(plan.extent_offset[extent]) == sum(n for _, _, n in file)
        first, last = plan.extent_piece[extent : extent + 2].tolist()
        within = 0
        for piece in range(first, last):
            assert int(plan.piece_extent_offset[piece]) == within
            length = int(plan.piece_length[piece])
            file.append((int(plan.piece_source[piece]), int(plan.piece_source_offset[piece]), length))
            within += length
        assert int(plan.extent_length[extent]) == within <= BLOCK
    expected = [(-1, header), *((source, sizes[source]) for source in order if sizes[source])]
    for source, nbytes in expected:  # in this order, each from its beginning to its end
        position = 0
        while position < nbytes:
            assert file[0][:2] == (source, position)
            position += file.pop(0)[2]
        assert position == nbytes
    assert not file
    assert plan.end == header + sum(sizes)
    assert not len(plan.patch_offset)


def test_records_that_go_to_a_device_share_extents() -> None:
    sizes = np.full(4, 3 * CHUNK, np.uint64)
    offset = np.arange(4, dtype=np.uint64) * np.uint64(3 * CHUNK + 4096)
    chunks = read.plan_chunks(offset, sizes, np.zeros(12, np.uint32))
    extents = {}
    for in_place in (0, 1):
        plan = read.plan_read(
            wanted=Runs.single(offset.astype(np.int64), np.zeros(4, np.int64), sizes.astype(np.int64)),
            dest=np.arange(4, dtype=np.int32),
            dest_nbytes=sizes,
            in_place=np.full(4, in_place, np.uint8),
            whole=np.ones(4, np.uint8),
            chunks=chunks,
            extent_nbytes=32 * CHUNK,
        )
        assert plan.piece_length.sum() == sizes.sum()
        extents[in_place] = plan.extent_length.tolist()
    assert extents == {0: [4 * 3 * CHUNK + 3 * 4096], 1: [3 * CHUNK] * 4}
