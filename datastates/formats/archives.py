"""Finds the records in the ZIP archives that ``torch.save`` writes. Every number is checked.

An archive is a file, or a stretch of a file that holds one tensor; then this is the counterpart of
:mod:`datastates.container.nested_archives`. The checksum of a record is taken from the central directory.
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

# only the fields that are used; APPNOTE 6.3.10
_END = struct.Struct("<4s6xH2IH")
_LOCATOR = struct.Struct("<4s4xQ4x")
_END64 = struct.Struct("<4s28x3Q")
_CENTRAL = struct.Struct("<4s4x2H4x3I3H8xI")
_LOCAL = struct.Struct("<4s2xH18x2H")
_DESCRIPTOR = struct.Struct("<4sI")
_UNKNOWN = 0xFFFFFFFF
_ZIP64 = 0x0001
_ENCRYPTED = 0x0001
_SMALL = 1 << 16
"""Largest directory or pickle in bytes of an archive of one tensor: they have a few hundred."""
PICKLE = b"data.pkl"
"""The record with the pickle, which holds everything but the tensors' elements."""
DATA = b"data/"
"""Prefix of the names of records that hold storages."""

Read = Callable[[int, int], bytes]
"""Reads ``length`` bytes at ``offset`` of an archive, given (offset, length); the archive must reach that far."""


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor in an archive; lengths and offsets in bytes.

    Attributes:
        array: The tensor's layout in its storage.
        offset: Offset of the storage in the archive.
        nbytes: Length of the storage.
        crc: CRC-32 of the storage; None if torch was told not to compute one.
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


class Archive:
    """An archive that ``torch.save`` made.

    Attributes:
        nbytes: Length of each record by its name, without the folder that all names begin with.
    """

    def __init__(self, read: Read, entries: dict[bytes, _Entry], end: int) -> None:
        """Take the entries of the directory, which begins at ``end``; see :func:`open_archive`."""
        self._read = read
        self._entries = entries
        self._end = end
        # torch.serialization.set_crc32_options(False) writes 0 in the place of every checksum
        self._checked = any(entry.crc for entry in entries.values())
        self.nbytes = {name: entry.nbytes for name, entry in entries.items()}

    def crc(self, name: bytes) -> int | None:
        """CRC-32 of a record; None if torch was told not to compute checksums."""
        return self._entries[name].crc if self._checked else None

    def offset(self, name: bytes) -> int:
        """Offset in bytes of a record's data; raises FormatError if the headers around the data contradict it."""
        return _data(self._read, self._entries[name], self._end)

    def read(self, name: bytes) -> bytes:
        """Read a record; raises FormatError if it does not match its checksum."""
        data = self._read(self.offset(name), self.nbytes[name])
        if (crc := self.crc(name)) is not None and checksums.crc32(data) != crc:
            raise FormatError(f"{name.decode('utf-8', 'replace')} does not match its checksum")
        return data

    @property
    def is_little(self) -> bool:
        """Whether the archive and this machine are little-endian. Older archives do not say: they are."""
        return sys.byteorder == "little" and (b"byteorder" not in self.nbytes or self.read(b"byteorder") == b"little")


def find_tensor(read: Read, nbytes: int) -> ArchivedTensor | None:
    """Find the tensor in an archive; None if this reader cannot read it, although torch might.

    Args:
        read: Reads from the archive.
        nbytes: The length of the archive.

    Raises:
        FormatError: The archive contradicts itself, or a small record does not match its checksum.
    """
    archive = open_archive(read, nbytes, largest=_SMALL)
    if archive is None or archive.nbytes.get(PICKLE, _SMALL + 1) > _SMALL:
        return None
    array = _unpickled(archive.read(PICKLE)) if archive.is_little else None
    if array is None:
        return None
    name = DATA + array.record.encode()
    check_place(array, archive.nbytes.get(name))
    return ArchivedTensor(array, archive.offset(name), archive.nbytes[name], archive.crc(name))


def check_place(array: StoredArray, nbytes: int | None) -> None:
    """Raise FormatError if an array does not lie within its storage of ``nbytes``, or that is None: it is missing."""
    if nbytes is None:
        raise FormatError(f"storage {array.record!r} is missing")
    if array.elements * dtypes.BY_NAME[array.dtype].itemsize > nbytes:
        raise FormatError(f"storage {array.record!r} is shorter than the pickle says")
    if array.offset + span(array.shape, array.stride) > array.elements:
        raise FormatError(f"a tensor reaches beyond its storage {array.record!r}")


@functools.lru_cache(1024)  # many tensors have the same pickle
def _unpickled(pickle: bytes) -> StoredArray | None:
    try:
        found = pickle_reader.loads(pickle, lambda array: array, with_torch=False)
    except (FormatError, ImportError):  # a subclass of tensors, or a sparse one, which only torch builds
        return None
    return found if isinstance(found, StoredArray) else None


def read_directory(read: Read, nbytes: int, *, largest: int, comment: int) -> tuple[bytes, int, int] | None:
    """Read the directory of an archive, also of one that torch did not write; None without one, or if it is longer.

    Arguments and errors are those of :func:`open_archive`.

    Returns:
        Its bytes, the number of records in it, and its offset in the archive.
    """
    end = nbytes - _END.size - comment
    if end < 0:
        return None
    magic, count, size, begin, found = _END.unpack(read(end, _END.size))
    if magic != b"PK\5\6" or found != comment:
        return None
    if end >= _LOCATOR.size + _END64.size:
        magic, end64 = _LOCATOR.unpack(read(end - _LOCATOR.size, _LOCATOR.size))
        if magic == b"PK\6\7":
            end -= _LOCATOR.size + _END64.size
            magic, count, size, begin = _END64.unpack(read(end, _END64.size))
            if magic != b"PK\6\6" or end64 != end:
                raise FormatError("its zip64 end record is not where the locator says")
    if begin + size != end:
        raise FormatError("its directory is not where its end record says")
    return None if size > largest else (read(begin, size), count, begin)


def open_archive(read: Read, nbytes: int, *, largest: int, comment: int = 0) -> Archive | None:
    """Read the directory of an archive; None if torch did not write it: it has no end, is compressed or encrypted.

    Args:
        read: Reads from the archive.
        nbytes: The length of the archive.
        largest: Longest directory in bytes; None is returned for an archive with a longer one.
        comment: Length of the archive's comment in bytes. A container of this package has its footer there.

    Raises:
        FormatError: The directory contradicts itself.
    """
    if (directory := read_directory(read, nbytes, largest=largest, comment=comment)) is None:
        return None
    data, count, begin = directory
    at, size = 0, len(data)
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
            raise FormatError("an uncompressed record has two different lengths")
        entries[name.partition(b"/")[2]] = _Entry(name, header, length, crc)
    if at != size:
        raise FormatError("its directory has more records than it says")
    return Archive(read, entries, begin) if len(entries) == count else None


def _data(read: Read, entry: _Entry, end: int) -> int:
    """Offset in bytes of a record's data. ``end``: the offset where the last record ends.

    The headers around the data must agree with the directory: a read of a part of the data has no checksum that would
    reveal a wrong place.
    """
    at = entry.header + _LOCAL.size
    if at > end:
        raise FormatError("a record begins beyond its end")
    magic, flags, name, extra = _LOCAL.unpack(read(entry.header, _LOCAL.size))
    begin: int = at + name + extra
    after = begin + entry.nbytes
    streamed = _DESCRIPTOR.size if flags & STREAMED else 0
    if magic != b"PK\3\4" or after + streamed > end:
        raise FormatError("a record is not where the directory says, or reaches into the directory")
    header = read(at, name + extra)
    list(_fields(header[name:]))
    agree = header[:name] == entry.name
    if streamed:
        agree &= _DESCRIPTOR.unpack(read(after, streamed)) == (b"PK\7\x08", entry.crc)
    if not agree:
        raise FormatError("the headers of a record do not agree with the directory")
    return begin


def _fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a header's extra part: kind and data of each. Torch pads headers with such a field."""
    while extra:
        if len(extra) < 4 or (end := 4 + int.from_bytes(extra[2:4], "little")) > len(extra):
            raise FormatError("the extra fields of a header do not fill it exactly")
        yield int.from_bytes(extra[:2], "little"), extra[4:end]
        extra = extra[end:]


def _widened(extra: bytes, numbers: tuple[int, ...]) -> Iterator[int]:
    """The numbers of an entry. Numbers too large for 32 bits are taken from its zip64 field."""
    count = numbers.count(_UNKNOWN)
    wide = dict(_fields(extra)).get(_ZIP64, b"") if count else b""
    if len(wide) < 8 * count:
        raise FormatError("a zip64 number is missing in its directory")
    known = iter(struct.unpack_from(f"<{count}Q", wide))
    return (next(known) if number == _UNKNOWN else number for number in numbers)
