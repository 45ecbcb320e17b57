"""Every byte of a container compared with its checksum, or with what the index makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datastates import container
from datastates.executor import read_bytes
from datastates.opened import Container
from datastates.protocol import full_key


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a container.

    Attributes:
        path: The file.
        key: The tensor or object, or the part of the file, that is wrong.
        what: What is wrong with it.
    """

    path: Path
    key: str
    what: str


def verify_container(source: Container, progress: Callable[[int], object]) -> Iterator[Problem]:
    """Read every byte of a container and compare it with its checksum, or with what the index makes of it.

    ``progress`` is told of bytes as they have been read.
    """
    read = read_bytes(source.path)
    index = source.index
    chunks = source.chunks(0, len(index.data_offset))
    wrong: set[int] = set()
    columns = zip(
        chunks.record.tolist(), chunks.offset.tolist(), chunks.length.tolist(), chunks.crc.tolist(), strict=True
    )
    total = np.zeros(len(index.record_crc), np.uint32)
    for record, offset, length, crc in columns:
        found = container.crc32(read(offset, length))
        total[record] = container.crc32_combine(int(total[record]), found, length)
        progress(length)
        if found != crc and record not in wrong:
            wrong.add(record)
            yield Problem(source.path, source.name_record(record), "does not match its checksum")
    for record in np.flatnonzero(total != index.record_crc).tolist():
        if record not in wrong:
            yield Problem(source.path, source.name_record(record), "its chunks' checksums contradict its record's")
    for offset, expected in container.frame_ranges(index):
        if read(offset, len(expected)) != expected:
            yield Problem(source.path, f"file framing at byte {offset}", "is damaged")
        progress(len(expected))
    yield from _verify_tail(source, progress)


def _verify_tail(source: Container, progress: Callable[[int], object]) -> Iterator[Problem]:
    index = source.index
    begin = index.records_end
    tail = read_bytes(source.path)(begin, source.nbytes - begin)
    progress(len(tail))
    pickle = tail[index.pickle_offset - begin : index.pickle_offset - begin + index.pickle_nbytes]
    damaged = [
        o for o in index.objects if container.crc32(pickle[o.offset - index.pickle_offset :][: o.nbytes]) != o.crc
    ]
    for stored in damaged:
        key = full_key(index.shards.providers[stored.provider], stored.key)
        yield Problem(source.path, key, "does not match its checksum")
    if damaged:
        return
    expected, _ = container.encode_tail(index, pickle)
    if tail != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(tail, expected, strict=False)) if a != b), min(len(tail), len(expected))
        )
        yield Problem(source.path, f"file framing at byte {begin + at}", "is damaged")
