"""Drop files from the page cache or read them into it, and check what is cached."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_TOLERATED = 0.01
"""The fraction of the bytes that may stay cached: the kernel cannot drop pages that wait in one of its batches."""


def files_of(path: Path) -> Iterator[Path]:
    """The file itself, or every file below a directory."""
    if path.is_file():
        yield path
    else:
        yield from (p for p in sorted(path.rglob("*")) if p.is_file())


def resident(path: Path) -> int:
    """Bytes of a file that are in the page cache, a multiple of the page size."""
    nbytes = path.stat().st_size
    if nbytes == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), pages)
        del first  # the mapping cannot be closed while something points into it
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore {path}")
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE


def drop(path: Path) -> None:
    """Drop a file, or all files below a directory, from the page cache; raises RuntimeError if too much stays."""
    files = list(files_of(path))
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    total = sum(file.stat().st_size for file in files)
    allowed = max(_TOLERATED * total, mmap.PAGESIZE * len(files))
    if sum(map(resident, files)) > allowed and os.access(_DROP_CACHES, os.W_OK):
        _DROP_CACHES.write_text("1")
    left = sum(map(resident, files))
    if left > allowed:
        raise RuntimeError(f"{left} of {total} bytes of {path} stay in the page cache")


def fill(path: Path) -> None:
    """Read a file, or all files below a directory, into the page cache."""
    buffer = bytearray(8 << 20)
    for file in files_of(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
