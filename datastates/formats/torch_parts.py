"""Finds the pickle and the storages in a file of ``torch.save``: a ZIP archive since torch 1.6. It checks each number.

An older file begins with five pickles: a magic number, a version, a description of the machine, the value, and the keys
of its storages. Behind them lies each storage: the number of its elements, and the elements. They are little-endian,
also if the description says that the machine was not.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datastates.container import archive as container_archive
from datastates.container import pickle_reader
from datastates.container.pickle_storages import storages_of
from datastates.errors import FormatError
from datastates.formats.archives import DATA, PICKLE, Archive, Read, open_archive, read_directory
from datastates.formats.record_file import Record

_BEGIN = re.compile(rb"\x80.(?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
"""The magic number, as pickles of all protocols from 2 on write it."""
_VERSION = 1001
"""Torch has written no other version."""
_COUNT = struct.Struct("<q")
_PICKLE_WINDOW = 1 << 16
"""Bytes to read at once to find the end of a pickle."""
_LINE = 4096
"""Longest line in bytes that a pickle may hold: names of classes and functions are lines."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a file of ``torch.save``.

    Attributes:
        pickle: The pickle of its value.
        records: Its storages, and what else has a checksum, by offset.
        numbers: The number of each storage's record, by the storage's name in the pickle.
    """

    pickle: bytes
    records: Sequence[Record]
    numbers: Mapping[str, int]


def is_legacy(head: bytes) -> bool:
    """Whether a file begins as files of ``torch.save`` did before torch 1.6."""
    return _BEGIN.match(head) is not None


def find_legacy_parts(read: Read, nbytes: int) -> Parts:
    """Find the parts of a file that :func:`is_legacy` knows.

    Args:
        read: Reads from the file.
        nbytes: The length of the file.

    Raises:
        FormatError: It is damaged or was cut short.
    """
    stream = _Stream(read, nbytes)
    _, version, _, value, keys = (stream.read_pickle() for _ in range(5))
    if (found := pickle_reader.loads(version)) != _VERSION:
        raise FormatError(f"a file of torch.save of version {found!r}, which no torch has written")
    storages, names = storages_of(value), pickle_reader.loads(keys)
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not texts or len(names) != len(storages) or set(names) != storages.keys():
        raise FormatError("it does not hold the storages that its pickle names")
    at, records = stream.tell(), []
    for name in names:
        begin = at + _COUNT.size
        if begin > nbytes:
            raise _cut_short(f"before storage {name!r}")
        (count,) = _COUNT.unpack(read(at, _COUNT.size))
        if count != storages[name].numel:
            raise FormatError(f"storage {name!r} has another length than its pickle says")
        at = begin + count * storages[name].elements[1]
        if at > nbytes:
            raise _cut_short(f"within storage {name!r}")
        records.append(Record(begin, at - begin, None))
    return Parts(value, records, {name: number for number, name in enumerate(names)})


def _cut_short(where: str) -> FormatError:
    return FormatError(f"it was cut short {where}")


class _Stream:
    """A file of pickles as :mod:`pickletools` reads one: by few large reads, and never beyond the file's end."""

    def __init__(self, read: Read, nbytes: int) -> None:
        self._read = read
        self._nbytes = nbytes
        self._at = 0
        self._window, self._begin = b"", 0

    def tell(self) -> int:
        """The offset of the next byte in the file."""
        return self._at

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes; raises FormatError where the file ends before."""
        if size > self._nbytes - self._at:
            raise _cut_short("within its pickles")
        begin = self._at - self._begin
        if begin + size > len(self._window):
            self._window = self._read(self._at, max(size, min(_PICKLE_WINDOW, self._nbytes - self._at)))
            self._begin, begin = self._at, 0
        self._at += size
        return self._window[begin : begin + size]

    def readline(self) -> bytes:
        """The bytes up to the end of a line; raises FormatError without one."""
        begin = self._at
        line = self.read(min(_LINE, self._nbytes - begin)).partition(b"\n")[0]
        self._at = begin + len(line)
        if self.read(1) != b"\n":
            raise FormatError("its pickles hold a line that is too long")
        return line + b"\n"

    def read_pickle(self) -> bytes:
        """The bytes of the next pickle; raises FormatError where no pickle follows."""
        begin = self._at
        try:
            for _ in pickletools.genops(self):  # type: ignore[arg-type]  # it needs these three methods
                pass
        except (ValueError, IndexError, struct.error) as error:
            raise FormatError(f"its pickles are damaged: {error}") from error
        return self._read(begin, self._at - begin)


HEAD = 512
"""Bytes at the beginning that hold the name of an archive's first record."""
_SCRIPT = b"/constants.pkl"
"""The end of the name of a record that only an archive of a TorchScript module has."""
_END, _END_NBYTES = b"PK\5\6", 22
"""The beginning of the record that ends an archive, and the length of one without a comment."""
_BEHIND = (1 << 16) + _END_NBYTES
"""Bytes at the end of a file in which torch looks for that record."""
_WINDOW = 1024
"""Bytes to read at once for the headers of a record."""


def find_parts(read: Read, nbytes: int) -> Parts:
    """Find the parts of a file.

    Args:
        read: Reads from the file.
        nbytes: The length of the file.

    Raises:
        FormatError: It is damaged, or no file of ``torch.save`` that this package reads.
    """
    if is_legacy(read(0, min(nbytes, HEAD))):
        return find_legacy_parts(read, nbytes)
    archive = _archive(read, nbytes)
    names = [name for name in archive.nbytes if name != PICKLE]
    records = [Record(archive.offset(name), archive.nbytes[name], archive.crc(name)) for name in names]
    order = sorted(range(len(names)), key=lambda i: (records[i].offset, records[i].nbytes))
    data = [(number, names[i]) for number, i in enumerate(order) if names[i].startswith(DATA)]
    numbers = {name.removeprefix(DATA).decode("utf-8", "replace"): number for number, name in data}
    return Parts(archive.read(PICKLE), [records[i] for i in order], numbers)


def _archive(read: Read, nbytes: int) -> Archive:
    footer = container_archive.FOOTER_NBYTES
    comment = footer if container_archive.is_ending(read(max(0, nbytes - footer), min(nbytes, footer))) else 0
    archive = open_archive(_ahead(read, nbytes), nbytes, largest=nbytes, comment=comment)
    if archive is None and (end := _end(read, nbytes)) is not None:  # bytes follow that are no part of it
        archive = open_archive(_ahead(read, end), end, largest=end)
    if archive is None:
        directory = read_directory(read, nbytes, largest=nbytes, comment=comment)
        if directory is not None and _SCRIPT in directory[0]:
            raise FormatError("a module of TorchScript: torch.jit.load reads it. Save the module's state_dict()")
        raise FormatError("it was cut short, or is no archive of torch.save: there is no end of a plain ZIP archive")
    if PICKLE not in archive.nbytes or not archive.is_little:
        raise FormatError("an archive without data.pkl, or of a big-endian machine")
    return archive


def _end(read: Read, nbytes: int) -> int | None:
    """The end of an archive without a comment, behind which other bytes may follow; None where torch finds none."""
    begin = max(0, nbytes - _BEHIND)
    at = read(begin, nbytes - begin).rfind(_END, 0, len(_END) - _END_NBYTES)
    return None if at < 0 else begin + at + _END_NBYTES


def _ahead(read: Read, nbytes: int) -> Read:
    """A function that reads a file by windows, so that one call reads all headers of a record."""
    window = 0, b""

    def ahead(offset: int, size: int) -> bytes:
        nonlocal window
        begin, data = window
        if not begin <= offset <= offset + size <= begin + len(data):
            data = read(offset, max(size, min(_WINDOW, nbytes - offset)))
            begin = offset
            if size <= _WINDOW:
                window = begin, data
        return data[offset - begin : offset - begin + size]

    return ahead
