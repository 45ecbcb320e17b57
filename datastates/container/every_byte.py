"""Reads a container from its first byte to its last, and compares each byte with a checksum or with the index."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from datastates._base.columns import U32
from datastates.container import archive, checksums, digests
from datastates.container.file import Container
from datastates.state.shards import full_key
from datastates.storage import store_of
from datastates.storage.in_pieces import in_pieces

Wrong = Callable[[str, str], None]
"""Is called with the key of a tensor or an object, or the name of a part of the file, and with what is wrong there."""


def read(source: Container, wrong: Wrong) -> Iterator[memoryview]:
    """Yield all bytes of a container in the order of the file; each byte has been compared once the last one is read.

    Args:
        source: The opened container.
        wrong: Called for each thing that is damaged, once. What it raises ends the reading.

    Raises:
        StorageError: The file cannot be read.
    """
    index = source.index
    chunks, frames = source.chunks(0, len(index.records)), archive.frame_ranges(index)
    damaged: set[int] = set()
    records, crcs = chunks.record.tolist(), chunks.crc.tolist()
    places = zip(chunks.offset.tolist(), chunks.length.tolist(), range(len(crcs)), strict=True)
    parts = sorted([*places, *((offset, len(frame), ~i) for i, (offset, frame) in enumerate(frames))])
    total = np.zeros(len(index.records.crc), np.uint32)
    # the records end to end, as one source
    begin = np.cumsum(index.records.nbytes, dtype=np.int64) - index.records.nbytes.astype(np.int64)
    plan = digests.plan_digests(index.shards, index.records.nbytes, np.zeros_like(begin), begin)
    digester = digests.digester(plan.runs)
    found = in_pieces(source.path, [(offset, length) for offset, length, _ in parts])
    for (offset, length, number), data in zip(parts, found, strict=True):
        if number >= 0:
            crc, record = checksums.crc32(data), records[number]
            digester.update(data)
            total[record] = checksums.crc32_combine(int(total[record]), crc, length)
            if crc != crcs[number] and record not in damaged:
                damaged.add(record)
                wrong(source.name_record(record), "does not match its checksum")
        elif data != frames[~number][1]:
            wrong(f"file framing at byte {offset}", "is damaged")
        yield data
    for record in np.flatnonzero(total != index.records.crc).tolist():
        if record not in damaged:
            damaged.add(record)
            wrong(source.name_record(record), "its chunks' checksums contradict its record's")
    _compare_digests(source, plan, plan.contributions(total, digester.finish(), index.shards), damaged, wrong)
    tail = store_of(source.path).read(source.path, index.records.end, source.nbytes - index.records.end)
    _compare_tail(source, tail, wrong)
    yield memoryview(tail)


def _compare_digests(source: Container, plan: digests.DigestPlan, found: U32, damaged: set[int], wrong: Wrong) -> None:
    """Compare the digests of tensors with the data that was read, except in ``damaged`` records."""
    table = source.index.shards
    differ = (table.digested == 1) & ((plan.known == 0) | (table.digest != found))
    sound = np.ones(len(source.index.records), bool)
    sound[list(damaged)] = False
    for i in np.flatnonzero(differ & sound[table.record]).tolist():
        what = "its digest contradicts its data" if plan.known[i] else "has a digest, which its places do not allow"
        wrong(table.row(i).key, what)


def _compare_tail(source: Container, tail: bytes, wrong: Wrong) -> None:
    index, begin = source.index, source.index.records.end
    pickle = tail[index.pickle_offset - begin : index.pickle_offset - begin + index.pickle_nbytes]
    damaged = [
        o for o in index.objects if checksums.crc32(pickle[o.offset - index.pickle_offset :][: o.nbytes]) != o.crc
    ]
    for stored in damaged:
        wrong(full_key(index.shards.providers[stored.provider], stored.key), "does not match its checksum")
    if not damaged and tail != (expected := archive.encode_tail(index, pickle)[0]):
        wrong(f"file framing at byte {begin + first_difference(tail, expected)}", "is damaged")


def first_difference(a: bytes, b: bytes) -> int:
    """The offset of the first byte that differs between two strings, or that only the longer one has."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
