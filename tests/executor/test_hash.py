"""Hashes of chunks, `nh-128`, are the function that docs/format.md describes, wherever the bytes lie."""

from __future__ import annotations

import numpy as np
import pytest

from datastates import _native
from datastates.config import IoSettings
from datastates.errors import ClosedError, DatastatesError
from datastates.executor.executor import Executor

CHUNK = 262144
W64, W128 = (1 << 64) - 1, (1 << 128) - 1


def _splitmix64(count: int) -> list[int]:
    outputs = []
    for i in range(1, count + 1):
        x = int.from_bytes(b"nh-128", "little") + i * 0x9E3779B97F4A7C15 & W64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & W64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & W64
        outputs.append(x ^ x >> 31)
    return outputs


KEYS = _splitmix64(1030 + 134 + 24)
K, Q = (np.array(keys, "<u8").view("<u4") for keys in (KEYS[:1030], KEYS[1030:1164]))
A = [low | high << 64 for low, high in zip(KEYS[1164::2], KEYS[1165::2], strict=True)]


def _sums(words: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The sums of products of neighbours along the last axis, all but it."""
    added = (words + keys).astype(np.uint64)
    return (added[..., 0::2] * added[..., 1::2]).sum(-1, dtype=np.uint64)


def described(chunk: bytes) -> bytes:
    """The hash by the words of docs/format.md."""
    rows = -(-len(chunk) // 512)
    words = np.frombuffer(chunk.ljust(512 * rows, b"\0"), "<u4").reshape(rows, 32, 4)
    columns = words.transpose(1, 0, 2).reshape(32, 4 * rows)
    first = np.stack([_sums(columns, K[4 * t : 4 * (t + rows)]) for t in range(4)], 1)
    middle = np.ascontiguousarray(first).view("<u4").reshape(256)
    second = [int(_sums(middle, Q[4 * t : 4 * t + 256])) for t in range(4)]
    halves = (a[0] + sum(k * s for k, s in zip(a[1:], [*second, len(chunk)], strict=True)) for a in (A[:6], A[6:]))
    return b"".join((half & W128).to_bytes(16, "little")[8:] for half in halves)


@pytest.mark.parametrize("nbytes", [1, 3, 4, 16, 17, 511, 512, 513, 4096, 100_001, CHUNK - 1, CHUNK])
def test_a_chunk_has_the_hash_that_the_format_describes(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert _native.hash_chunks(data) == described(data)


def test_each_chunk_of_a_buffer_has_a_hash() -> None:
    data = np.random.default_rng(0).bytes(2 * CHUNK + 5)
    parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    assert _native.hash_chunks(data) == b"".join(map(described, parts))
    assert _native.hash_chunks(np.frombuffer(data[1:], np.uint8)) != _native.hash_chunks(data)
    assert _native.hash_chunks(b"") == b""


def test_a_job_gives_a_row_for_each_chunk_of_all_sources() -> None:
    data = np.frombuffer(np.random.default_rng(1).bytes(3 * CHUNK), np.uint8)
    nbytes = np.array([5, 0, 2 * CHUNK + 1, CHUNK, 1], np.uint64)
    begin = np.array([0, 9, 1, 2, 0], np.uint64)
    sources = begin + np.uint64(data.ctypes.data), np.full(5, -1, np.int32), np.zeros(5, np.uint64)
    executor = Executor(IoSettings(), 64 << 20)
    job = executor.submit_hash(sources, nbytes)
    assert job.wait(60)
    parts = [data[b : b + n].tobytes() for b, n in zip(begin.tolist(), nbytes.tolist(), strict=True)]
    assert job.hashes.shape == (6, 16)
    assert job.hashes.tobytes() == b"".join(map(_native.hash_chunks, parts))
    with pytest.raises(DatastatesError, match="device has"):
        executor.submit_hash((sources[0], sources[1][1:], sources[2]), nbytes)
    executor.close()
    with pytest.raises(ClosedError):
        executor.submit_hash(sources, nbytes)


def test_memory_that_is_gone_is_told_and_the_rest_is_hashed() -> None:
    data = np.arange(300_000, dtype=np.int32)
    address = np.array([4096, data.ctypes.data, 8192], np.uint64)
    nbytes = np.array([CHUNK + 1, data.nbytes, 5], np.uint64)
    executor = Executor(IoSettings(), 64 << 20)
    job = executor.submit_hash((address, np.full(3, -1, np.int32), np.zeros(3, np.uint64)), nbytes)
    assert job.wait(60)
    assert job.lost == [0, 2]
    assert job.hashes[2:-1].tobytes() == _native.hash_chunks(data)


def test_a_fingerprint_tells_that_memory_was_rewritten_or_is_gone() -> None:
    ranges = [np.zeros(nbytes, np.uint8) for nbytes in (1, 7, 4096, 4097, 300_001, 3_000_000)]
    nbytes = np.array([one.nbytes for one in ranges], np.uint64)
    addresses = np.array([one.ctypes.data for one in ranges], np.uint64)
    before = _native.host_fingerprints(addresses, nbytes)
    assert np.array_equal(_native.host_fingerprints(addresses, nbytes), before)
    for one in ranges:
        one[:] = 1
    after = _native.host_fingerprints(addresses, nbytes)
    assert (before != after).all()
    assert after.all()
    assert _native.host_fingerprints(np.array([4096], np.uint64), np.array([8192], np.uint64)) == 0
