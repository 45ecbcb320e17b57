"""Encoding the frames of many records in one call gives the same as encoding each record alone."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from datastates.container import zip_frames
from datastates.container.records import Records
from datastates.planning import write


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 101, 20_000])
@pytest.mark.parametrize("known", [False, True])
def test_frames_of_many_records_are_those_of_each(count: int, known: bool) -> None:
    random = np.random.default_rng(count)
    sizes = random.choice([0, 1, 4096, 70_000], count).astype(np.uint64)
    sizes[::1000] = 1 << 33
    plan = write.plan_write(sizes, np.zeros(count, np.uint8), zip_frames.header_nbytes(count), 8 << 20)
    nbytes = plan.source_nbytes[plan.order]
    crc = random.integers(0, 1 << 32, count, np.uint32)
    header_nbytes = zip_frames.header_nbytes(count).tolist()
    expected, directory = [], []
    rows = zip(plan.header_offset.tolist(), plan.data_offset.tolist(), nbytes.tolist(), crc.tolist(), strict=True)
    for i, (header, data, size, checksum) in enumerate(rows):
        name = b"archive/data/%d" % i
        assert header_nbytes[i] == 30 + len(name) + 24
        expected.append(zip_frames.local_header(name, size, data - header, crc=0, flags=8))
        expected.append(struct.pack("<4sIQQ", b"PK\7\x08", checksum if known else 0, size, size))
        directory.append(zip_frames.central_header(name, 8, checksum, size, header))
    made = zip_frames.encode_frames(Records.of(plan, crc if known else None))
    assert made == b"".join(expected)
    assert zip_frames.encode_directory(Records.of(plan, crc)) == b"".join(directory)
