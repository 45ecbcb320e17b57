"""Archives that ``torch.save`` makes of one tensor: where its bytes are, every number checked before it is used. Pure.

The mirror of :mod:`datastates.container.nested_archives`, for what others wrote. A record's checksum is in the central
directory only.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from datastates.container import checksums, pickle_reader
from datastates.container.zip_frames import STREAMED
from datastates.errors import FormatError
from datastates.state import dtypes
from datastates.state.shards import StoredArray
from datastates.state.strides import span

# of each what is looked at; APPNOTE 6.3.10
_END = struct.Struct("<4s6xH2IH")
_LOCATOR = struct.Struct("<4s4xQ4x")
_END64 = struct.Struct("<4s28x3Q")
_CENTRAL = struct.Struct("<4s4x2H4x3I3H8xI")
_LOCAL = struct.Struct("<4s2xH18x2H")
_DESCRIPTOR = struct.Struct("<4sI")
_UNKNOWN = 0xFFFFFFFF
_ZIP64 = 0x0001
_ENCRYPTED = 0x0001
_LARGEST = 1 << 16
"""Bytes of a directory, or of a pickle: those of one tensor have some hundreds."""

Read = Callable[[int, int], bytes]
"""Reads (offset, length) of an archive, which has to reach so far."""


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor in an archive; lengths and offsets in bytes.

    Attributes:
        array: How it lies in its storage.
        offset: Where the storage begins in the archive.
        nbytes: Length of the storage.
        crc: CRC-32 of the storage; None where torch was told to compute none.
    """

    array: StoredArray
    offset: int
    nbytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    header: int
    nbytes: int
    crc: int


def find_tensor(read: Read, nbytes: int) -> ArchivedTensor | None:
    """Find the tensor in an archive of that length; None where it is none that is known here: torch may know it.

    Raises:
        FormatError: It contradicts itself.
    """
    found = _directory(read, nbytes)
    if found is None or sys.byteorder != "little":
        return None
    entries, end = found
    # with torch.serialization.set_crc32_options(False) there is 0 in the place of every checksum
    checked = any(entry.crc for entry in entries.values())

    def small(name: bytes) -> bytes | None:
        entry = entries.get(name)
        if entry is None or entry.nbytes > _LARGEST:
            return None
        data = read(_data(read, entry, end), entry.nbytes)
        if checked and checksums.crc32(data) != entry.crc:
            raise FormatError(f"{name.decode()} does not match its checksum")
        return data

    pickle = small(b"data.pkl")
    if pickle is None or (b"byteorder" in entries and small(b"byteorder") != b"little"):
        return None
    array = _unpickled(pickle)
    if array is None:
        return None
    entry = entries.get(b"data/" + array.record.encode())
    if entry is None:
        raise FormatError(f"its storage {array.record!r} is not there")
    itemsize = dtypes.BY_NAME[array.dtype].itemsize
    if array.elements * itemsize > entry.nbytes or array.offset + span(array.shape, array.stride) > array.elements:
        raise FormatError("its tensor reaches beyond its storage")
    return ArchivedTensor(array, _data(read, entry, end), entry.nbytes, entry.crc if checked else None)


@functools.lru_cache(1024)  # layers are alike
def _unpickled(pickle: bytes) -> StoredArray | None:
    if b"conj" in pickle or b"neg" in pickle:  # bits that torch sets on a tensor, and that are not in its bytes
        return None
    try:
        found = pickle_reader.loads(pickle, lambda array: array)
    except FormatError:  # a subclass of tensors, say
        return None
    return found if isinstance(found, StoredArray) else None


def _directory(read: Read, nbytes: int) -> tuple[dict[bytes, _Entry], int] | None:
    """The records by name, without the folder that they all are in, and where the directory of them begins."""
    end = nbytes - _END.size
    if end < 0:
        return None
    magic, count, size, begin, comment = _END.unpack(read(end, _END.size))
    if magic != b"PK\5\6" or comment:
        return None
    if end >= _LOCATOR.size + _END64.size:
        magic, end64 = _LOCATOR.unpack(read(end - _LOCATOR.size, _LOCATOR.size))
        if magic == b"PK\6\7":
            end -= _LOCATOR.size + _END64.size
            magic, count, size, begin = _END64.unpack(read(end, _END64.size))
            if magic != b"PK\6\6" or end64 != end:
                raise FormatError("its end is not where it says")
    if begin + size != end:
        raise FormatError("its directory is not where its end says")
    if size > _LARGEST:
        return None
    data, at = read(begin, size), 0
    entries: dict[bytes, _Entry] = {}
    for _ in range(count):
        if at + _CENTRAL.size > size:
            raise FormatError("its directory ends too early")
        magic, flags, method, crc, packed, length, *lengths, header = _CENTRAL.unpack_from(data, at)
        name_at, extra_at = at + _CENTRAL.size, at + _CENTRAL.size + lengths[0]
        at = extra_at + lengths[1] + lengths[2]
        if magic != b"PK\1\2" or at > size:
            raise FormatError("its directory is no list of records")
        name = data[name_at:extra_at]
        length, packed, header = _widened(data[extra_at : extra_at + lengths[1]], (length, packed, header))
        if method or flags & _ENCRYPTED:
            return None
        if packed != length:
            raise FormatError("a record is stored in another length than its own")
        entries[name.partition(b"/")[2]] = _Entry(name, header, length, crc)
    if at != size:
        raise FormatError("its directory has more records than it says")
    return (entries, begin) if len(entries) == count else None


def _data(read: Read, entry: _Entry, end: int) -> int:
    """Where the data of a record begins, given where all records end.

    What stands around the data has to agree: where a part of it is read, no checksum tells that it is another place.
    """
    at = entry.header + _LOCAL.size
    if at > end:
        raise FormatError("a record begins beyond its end")
    magic, flags, name, extra = _LOCAL.unpack(read(entry.header, _LOCAL.size))
    begin: int = at + name + extra
    after = begin + entry.nbytes
    streamed = _DESCRIPTOR.size if flags & STREAMED else 0
    if magic != b"PK\3\4" or after + streamed > end:
        raise FormatError("a record is not where its directory says, or reaches beyond it")
    header = read(at, name + extra)
    list(_fields(header[name:]))
    agree = header[:name] == entry.name
    if streamed:
        agree &= _DESCRIPTOR.unpack(read(after, streamed)) == (b"PK\7\x08", entry.crc)
    if not agree:
        raise FormatError("a record is another than its directory says")
    return begin


def _fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a header's extra part, by their kinds; torch pads a header with one."""
    while extra:
        if len(extra) < 4 or (end := 4 + int.from_bytes(extra[2:4], "little")) > len(extra):
            raise FormatError("a header is longer or shorter than what is in it")
        yield int.from_bytes(extra[:2], "little"), extra[4:end]
        extra = extra[end:]


def _widened(extra: bytes, numbers: tuple[int, ...]) -> Iterator[int]:
    """Numbers of an entry, those that 32 bits do not hold as its zip64 field says them."""
    count = numbers.count(_UNKNOWN)
    wide = dict(_fields(extra)).get(_ZIP64, b"") if count else b""
    if len(wide) < 8 * count:
        raise FormatError("a number is missing in its directory")
    known = iter(struct.unpack_from(f"<{count}Q", wide))
    return (next(known) if number == _UNKNOWN else number for number in numbers)
