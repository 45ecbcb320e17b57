"""Encodes the ZIP64 framing of a container: headers, descriptors and padding, which decide the places of the data.

It follows APPNOTE 6.3.10; torch 2.13 accepts it. ``docs/format.md`` specifies the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from datastates._base.columns import I64, U8, U32, U64
from datastates._base.sizes import DESCRIPTOR, DESCRIPTOR_CRC, SMALL
from datastates.container.checksums import crc32
from datastates.container.records import Records

ROOT = b"archive/"
"""The folder of all records, by torch's convention."""
PICKLE_NAME = ROOT + b"data.pkl"
INDEX_NAME = ROOT + b".datastates/index"
CONSTANTS = ((ROOT + b"byteorder", b"little"), (ROOT + b"version", b"3\n"))
"""Names and data of the records that are the same in all containers."""
STREAMED = 0x0008
"""The flag of a record whose CRC-32 follows its data, in a descriptor."""
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4sIQQ")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
CENTRAL_CRC = 16
"""Offset of the CRC-32 in an entry of a central directory."""
_ZIP64_LOCAL, _ZIP64_CENTRAL, _PADDING = 0x0001, 0x0001, 0x4246  # "FB": the padding field that torch uses
_NEEDS, _MADE_BY, _EPOCH = 45, 0x031E, 0x0021
_UNKNOWN = 0xFFFFFFFF


def record_name(record: int) -> bytes:
    """Name of a storage record, by its number in the file, as torch gives it."""
    return ROOT + b"data/%d" % record


def header_nbytes(count: int) -> U64:
    """Length of each storage record's shortest local header."""
    result = np.empty(count, np.uint64)
    for first, last in _alike(count):
        result[first:last] = shortest_header(record_name(first))
    return result


def shortest_header(name: bytes) -> int:
    """Length of a local header without padding: fixed part, name, zip64 field and an empty padding field."""
    return _LOCAL.size + len(name) + 20 + 4


def local_header(
    name: bytes, nbytes: int, length: int, *, crc: int, flags: int, nested: tuple[int, bytes] = (0, b"")
) -> bytes:
    """Encode a local header, padded to ``length`` bytes so that the data behind it is aligned.

    ``nested`` is an offset within the header, and bytes to put there, in the padding.
    """
    extra = length - _LOCAL.size - len(name)
    head = _LOCAL.pack(b"PK\3\4", _NEEDS, flags, 0, 0, _EPOCH, crc, _UNKNOWN, _UNKNOWN, len(name), extra)
    zip64 = struct.pack("<HHQQ", _ZIP64_LOCAL, 16, nbytes, nbytes)
    own = head + name + zip64 + struct.pack("<HH", _PADDING, extra - 24)
    at, data = nested
    return (own.ljust(at, b"\0") + data).ljust(length, b"\0")


def encode_frames(records: Records) -> memoryview:
    """Encode all bytes between the storage records' data, end to end: local headers, padding, descriptors.

    Where a checksum is unknown, the executor fills it in as the data goes by.
    """
    length = records.data_offset.astype(np.int64) - records.header_offset.astype(np.int64)
    descriptor = np.cumsum(length + DESCRIPTOR) - DESCRIPTOR  # where it begins in the result
    result = np.zeros(int(descriptor[-1]) + DESCRIPTOR if len(length) else 0, np.uint8)
    for first, last in _alike(len(length)):
        run, shortest = slice(first, last), shortest_header(record_name(first))
        headers = _copies(local_header(record_name(first), 0, shortest, crc=0, flags=STREAMED), last - first)
        _put_digits(headers, shortest - 24, first)
        _put(headers, _LOCAL.size - 2, "<u2", length[run] - (shortest - 24))
        _put(headers, shortest - 20, "<u8", records.nbytes[run])
        _put(headers, shortest - 12, "<u8", records.nbytes[run])
        _put(headers, shortest - 2, "<u2", length[run] - shortest)
        _scatter(result, descriptor[run] - length[run], headers)
        descriptors = _copies(_DESCRIPTOR.pack(b"PK\7\x08", 0, 0, 0), last - first)
        _put(descriptors, DESCRIPTOR_CRC, "<u4", records.crc[run])
        _put(descriptors, 8, "<u8", records.nbytes[run])
        _put(descriptors, 16, "<u8", records.nbytes[run])
        _scatter(result, descriptor[run], descriptors)
    return result.data


def encode_small(
    records: Sequence[tuple[bytes, bytes]], begin: int, nested: tuple[int, bytes] = (0, b"")
) -> tuple[bytes, bytes]:
    """Records whose data is known, end to end with their headers, and their entries in the central directory.

    Args:
        records: Name and data of each.
        begin: File offset of the first one's header.
        nested: Bytes within that header, as for :func:`local_header`.
    """
    parts: list[bytes] = []
    entries: list[bytes] = []
    position = begin
    for name, data in records:
        shortest = max(nested[0] + len(nested[1]), shortest_header(name))
        length = aligned(position + shortest) - position
        crc = crc32(data)
        entries.append(central_header(name, 0, crc, len(data), position))
        parts += [local_header(name, len(data), length, crc=crc, flags=0, nested=nested), data]
        nested = (0, b"")
        position += length + len(data)
    return b"".join(parts), b"".join(entries)


def pickle_place(records_end: int, header_nbytes: int = 0) -> int:
    """File offset of the data of ``data.pkl``, given the records' end and the least length of its local header."""
    return aligned(records_end + max(header_nbytes, shortest_header(PICKLE_NAME)))


def aligned(offset: int) -> int:
    """``offset``, rounded up to a multiple of :data:`~datastates._base.sizes.SMALL`."""
    return -(-offset // SMALL) * SMALL


def central_header(name: bytes, flags: int, crc: int, nbytes: int, offset: int) -> bytes:
    """Encode an entry of the central directory."""
    head = _CENTRAL.pack(
        b"PK\1\2", _MADE_BY, _NEEDS, flags, 0, 0, _EPOCH, crc, _UNKNOWN, _UNKNOWN, len(name), 28, 0, 0, 0, 0, _UNKNOWN
    )
    return head + name + struct.pack("<HHQQQ", _ZIP64_CENTRAL, 24, nbytes, nbytes, offset)


def encode_directory(records: Records) -> bytes:
    """Encode the entries of all storage records in the central directory."""
    parts = []
    for first, last in _alike(len(records)):
        run = slice(first, last)
        entries = _copies(central_header(record_name(first), STREAMED, 0, 0, 0), last - first)
        end = entries.shape[1]
        _put(entries, CENTRAL_CRC, "<u4", records.crc[run])
        _put_digits(entries, end - 28, first)
        _put(entries, end - 24, "<u8", records.nbytes[run])
        _put(entries, end - 16, "<u8", records.nbytes[run])
        _put(entries, end - 8, "<u8", records.header_offset[run])
        parts.append(entries.tobytes())
    return b"".join(parts)


def encode_ending(entries: int, offset: int, nbytes: int, comment: bytes) -> bytes:
    """Encode the end records and the comment that follow a central directory.

    The directory has ``entries`` entries and ``nbytes`` bytes, and begins at ``offset``.
    """
    end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY, _NEEDS, 0, 0, entries, entries, nbytes, offset)
    locator = _LOCATOR.pack(b"PK\6\7", 0, offset + nbytes, 1)
    end = _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _UNKNOWN, _UNKNOWN, len(comment))
    return end64 + locator + end + comment


ENDING_NBYTES = _END64.size + _LOCATOR.size + _END.size
"""Bytes between the central directory and the comment."""


# --- many frames at once: rows of bytes, made as copies of one frame and then given their own numbers

_RUN = 16384
"""Most records whose frames are made at once."""


def _alike(count: int) -> Iterator[tuple[int, int]]:
    """Cut the record numbers below ``count`` into runs with equally many digits, whose frames have the same layout.

    A run is short enough that its frames stay in a core's cache while they are filled in.
    """
    first = 0
    while first < count:
        last = min(count, 10 ** len(str(first)), first + _RUN)
        yield first, last
        first = last


def _copies(frame: bytes, count: int) -> U8:
    return np.tile(np.frombuffer(frame, np.uint8), (count, 1))


def _put(rows: U8, at: int, dtype: str, numbers: U64 | U32 | I64) -> None:
    """Write one number into each row, as ``dtype``, at byte ``at`` of the row."""
    rows[:, at : at + np.dtype(dtype).itemsize].view(dtype)[:, 0] = numbers


def _put_digits(rows: U8, end: int, first: int) -> None:
    """Write the record numbers from ``first`` on so that they end at ``end``."""
    rest = np.arange(first, first + len(rows))
    for at in range(end - 1, end - 1 - len(str(first)), -1):
        rest, digit = np.divmod(rest, 10)
        rows[:, at] = digit + ord("0")


def _scatter(target: U8, at: I64, rows: U8) -> None:
    """Write each row into ``target`` at its offset, through a view of all overlapping stretches of a row's length."""
    row = np.dtype(f"V{rows.shape[1]}")
    np.ndarray(len(target) - row.itemsize + 1, row, target, 0, (1,))[at] = rows.view(row)[:, 0]
