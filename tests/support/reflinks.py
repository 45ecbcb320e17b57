"""Files that share ranges on a file system that cannot: what would be shared is copied."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from unittest import mock

FICLONERANGE = 0x4020940D
PAGE = 4096

ranges: list[tuple[int, int]] = []
"""Offset and length of each range that was shared."""


def clone(target: int, operation: int, where: bytes) -> int:
    """Do as ``ioctl`` does on XFS, for whole pages or the rest of a file; returns 0."""
    source, offset, nbytes, at = struct.unpack("<qQQQ", where)
    assert operation == FICLONERANGE
    size = os.fstat(source).st_size
    if offset % PAGE or at % PAGE or (nbytes % PAGE and offset + nbytes != size) or offset + nbytes > size:
        raise OSError(errno.EINVAL, "not whole pages of the file")
    with open(f"/proc/self/fd/{target}", "r+b") as written:
        os.pwrite(written.fileno(), os.pread(source, nbytes, offset), at)
    ranges.append((offset, nbytes))
    return 0


def emulate() -> None:
    """Let all files of this process share ranges so from now on."""
    mock.patch.object(fcntl, "ioctl", clone).start()
