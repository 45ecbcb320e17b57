"""Reads the records of a file that Weights & Biases writes: the log format of LevelDB, with a header before it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK = 7, 32_768
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """Yield each record of the file, joined from the pieces in its blocks."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, record = _HEADER, b""
    while at < len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # no room for a piece: the rest of the block is empty
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
