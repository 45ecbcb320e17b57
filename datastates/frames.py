"""The ZIP64 framing of a container: headers, descriptors, padding, and where they put the data. Pure numbers and bytes.

Read off APPNOTE 6.3.10 and off what torch 2.13 writes and accepts; ``docs/format.md`` is the contract.
"""

from __future__ import annotations

import struct

import numpy as np

from datastates.plan import SMALL, U32, U64

ROOT = b"archive/"
"""The folder of all records, by torch's convention."""
PICKLE_NAME = ROOT + b"data.pkl"
INDEX_NAME = ROOT + b".datastates/index"
STREAMED = 0x0008
"""The flag of a record whose CRC-32 follows its data, in a descriptor."""
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_ZIP64_LOCAL, _ZIP64_CENTRAL, _PADDING = 0x0001, 0x0001, 0x4246  # "FB": the padding field that torch uses
_NEEDS, _MADE_BY, _EPOCH = 45, 0x031E, 0x0021
_UNKNOWN = 0xFFFFFFFF


def record_names(count: int) -> list[bytes]:
    """Names of the storage records, in file order, as torch gives them."""
    return [ROOT + b"data/%d" % i for i in range(count)]


def header_nbytes(count: int) -> U64:
    """Length of each storage record's shortest local header."""
    return np.array([shortest_header(name) for name in record_names(count)], np.uint64)


def shortest_header(name: bytes) -> int:
    """Length of a local header without padding: fixed part, name, zip64 field and an empty padding field."""
    return _LOCAL.size + len(name) + 20 + 4


def local_header(name: bytes, nbytes: int, length: int, *, crc: int, flags: int) -> bytes:
    """A local header padded to ``length``, so that the data behind it is aligned."""
    extra = length - _LOCAL.size - len(name)
    head = _LOCAL.pack(b"PK\3\4", _NEEDS, flags, 0, 0, _EPOCH, crc, _UNKNOWN, _UNKNOWN, len(name), extra)
    zip64 = struct.pack("<HHQQ", _ZIP64_LOCAL, 16, nbytes, nbytes)
    return head + name + zip64 + struct.pack("<HH", _PADDING, extra - 24) + bytes(extra - 24)


def encode_frames(header_offset: U64, data_offset: U64, nbytes: U64, crc: U32 | None = None) -> bytes:
    """All bytes between the storage records' data, end to end: descriptors, local headers, padding.

    Without ``crc`` the descriptors' CRC fields are zero, for the executor to fill in as the data goes by.
    """
    frames = []
    descriptor = b""
    names = record_names(len(nbytes))
    columns = zip(names, header_offset.tolist(), data_offset.tolist(), nbytes.tolist(), strict=True)
    for i, (name, header, data, size) in enumerate(columns):
        frames.append(descriptor + local_header(name, size, data - header, crc=0, flags=STREAMED))
        descriptor = struct.pack("<4sIQQ", b"PK\7\x08", 0 if crc is None else int(crc[i]), size, size)
    return b"".join([*frames, descriptor])


def pickle_place(records_end: int) -> int:
    """Where the data of ``data.pkl`` begins, given where the records end."""
    return aligned(records_end + shortest_header(PICKLE_NAME))


def aligned(offset: int) -> int:
    """The next multiple of :data:`~datastates.plan.SMALL`."""
    return -(-offset // SMALL) * SMALL


def central_header(name: bytes, flags: int, crc: int, nbytes: int, offset: int) -> bytes:
    """An entry of the central directory."""
    head = _CENTRAL.pack(
        b"PK\1\2", _MADE_BY, _NEEDS, flags, 0, 0, _EPOCH, crc, _UNKNOWN, _UNKNOWN, len(name), 28, 0, 0, 0, 0, _UNKNOWN
    )
    return head + name + struct.pack("<HHQQQ", _ZIP64_CENTRAL, 24, nbytes, nbytes, offset)


def encode_ending(entries: int, offset: int, nbytes: int, comment: bytes) -> bytes:
    """What follows a central directory of so many entries, of so many bytes, at that offset; the comment comes last."""
    end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY, _NEEDS, 0, 0, entries, entries, nbytes, offset)
    locator = _LOCATOR.pack(b"PK\6\7", 0, offset + nbytes, 1)
    end = _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _UNKNOWN, _UNKNOWN, len(comment))
    return end64 + locator + end + comment


ENDING_NBYTES = _END64.size + _LOCATOR.size + _END.size
"""Bytes between the central directory and the comment."""
