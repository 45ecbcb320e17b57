"""How much memory a process still takes when it fills arrays: memory that is allocated has no pages until a write."""

from __future__ import annotations

import mmap
import os

import numpy as np

from datastates._base.columns import I64

_TAKEN = np.uint64(3 << 62)
"""The bits of an entry of ``pagemap`` that say that a page is in memory, or in swap space."""
_ENTRIES = 1 << 20
"""Entries of ``pagemap`` to read at once. An entry is 8 bytes, and describes one page."""


def untouched_nbytes(begin: I64, end: I64) -> int:
    """Bytes of memory that this process takes in addition when it fills ranges of addresses; a lower bound.

    Pages count that were never accessed, neither read nor written. Left out are pages that lie in a range only in part,
    files and shared memory that are mapped, and, where the kernel does not say which pages were accessed, everything.

    Args:
        begin: The first address of each range. The ranges are disjoint, and ascend.
        end: For each range, the address past its last byte.
    """
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return mmap.PAGESIZE * sum(_untouched(pagemap, *pages) for pages in _private_pages(begin, end))
    finally:
        os.close(pagemap)


def _private_pages(begin: I64, end: I64) -> list[tuple[int, int]]:
    """The numbers of the first page and of the page past the last one, for each range in private memory of no file."""
    first, last = _private_memory()
    within = np.searchsorted(last, begin, side="right")
    kept = within < len(last)
    begin, end, within = begin[kept], end[kept], within[kept]
    low = -(-np.maximum(begin, first[within]) // mmap.PAGESIZE)
    high = np.minimum(end, last[within]) // mmap.PAGESIZE
    return [(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True) if a < b]


def _private_memory() -> tuple[I64, I64]:
    """The begins and ends of this process's private memory of no file, in ascending order; neighbours are joined."""
    first: list[int] = []
    last: list[int] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split()
            if inode != "0":
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if last and last[-1] == begin:
                last[-1] = end
            elif end < 1 << 63:  # above lies the kernel's page of system calls
                first.append(begin)
                last.append(end)
    return np.array(first, np.int64), np.array(last, np.int64)


def _untouched(pagemap: int, first: int, last: int) -> int:
    """The number of pages, from number ``first`` to before ``last``, that were never accessed."""
    count = 0
    for at in range(first, last, _ENTRIES):
        entries = os.pread(pagemap, 8 * min(_ENTRIES, last - at), 8 * at)
        count += int(np.count_nonzero(np.frombuffer(entries, np.uint64) & _TAKEN == 0))
    return count
