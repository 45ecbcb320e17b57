"""Memory that is allocated and was never accessed, as the kernel tells of it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from datastates._base import untouched_memory
from datastates._base.untouched_memory import untouched_nbytes

PAGE = mmap.PAGESIZE


def pages(count: int) -> np.ndarray:
    """Private memory that nobody has accessed; the kernel gives it single pages, no huge ones."""
    block = mmap.mmap(-1, count * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(block, np.uint8)


def untouched(*arrays: np.ndarray) -> int:
    begin = np.array([array.ctypes.data for array in arrays], np.int64)
    order = np.argsort(begin)
    return untouched_nbytes(begin[order], (begin + [array.nbytes for array in arrays])[order])


def test_pages_count_until_they_are_accessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untouched_memory, "_ENTRIES", 3)
    block = pages(10)
    assert untouched(block) == 10 * PAGE
    block[2 * PAGE : 6 * PAGE] = 1
    assert untouched(block) == 6 * PAGE
    assert int(block[9 * PAGE]) == 0
    assert untouched(block) == 5 * PAGE
    block[:] = 1
    assert untouched(block) == 0


def test_pages_that_lie_in_a_range_in_part_do_not_count() -> None:
    block = pages(10)
    assert untouched(block[1 : 3 * PAGE], block[4 * PAGE + 1 : 5 * PAGE - 1], block[6 * PAGE : -1]) == 5 * PAGE


def test_files_and_shared_memory_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(4 * PAGE))
    file = np.memmap(tmp_path / "f", np.uint8, "r+")
    shared = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)
    own = pages(2)
    assert untouched(file, shared, own) == 2 * PAGE


def test_no_ranges() -> None:
    assert untouched_nbytes(np.zeros(0, np.int64), np.zeros(0, np.int64)) == 0


def test_a_kernel_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    block = pages(2)
    monkeypatch.setattr(untouched_memory.os, "open", refuse)
    assert untouched(block) == 0
