"""Asks a file system where the bytes of a file lie on its disk, by the call ``FS_IOC_FIEMAP`` of Linux."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from datastates.storage.extents import Extent

_FS_IOC_FIEMAP = 0xC020660B
_HEAD, _EXTENT = struct.Struct("<QQIIII"), struct.Struct("<QQQQQIIII")  # <linux/fiemap.h>
_AT_ONCE = 512
_SYNC = 1
_LAST, _NOWHERE, _SHARED = 0x1, 0x2 | 0x4 | 0x200, 0x2000
"""Flags of an extent: the last one; without a place of its own, as it is unknown, delayed or inline; shared."""
_UNKNOWN = (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EBADR)
"""Error numbers of file systems that do not tell."""


def extents_of(fd: int) -> list[Extent] | None:
    """The extents of an open file, ascending; None where its file system does not tell. Raises OSError."""
    found: list[Extent] = []
    at, looked = 0, os.fstat(fd)
    while True:
        data = bytearray(_HEAD.size + _AT_ONCE * _EXTENT.size)
        _HEAD.pack_into(data, 0, at, (1 << 64) - 1 - at, _SYNC, 0, _AT_ONCE, 0)
        try:
            fcntl.ioctl(fd, _FS_IOC_FIEMAP, data)
        except OSError as error:
            if error.errno in _UNKNOWN:
                return None
            raise
        count = _HEAD.unpack_from(data)[3]
        for i in range(count):
            begin, place, nbytes, _, _, flags, *_ = _EXTENT.unpack_from(data, _HEAD.size + i * _EXTENT.size)
            at = begin + nbytes
            if not flags & _NOWHERE:
                disk, end = (looked.st_dev, place - begin), min(at, looked.st_size)
                found.append(Extent(disk, begin, end, bool(flags & _SHARED)))
            if flags & _LAST:
                return found
        if not count:
            return found
