"""Finds the pickle and the storages in a file of ``torch.save``, which is a ZIP archive since torch 1.6."""

from __future__ import annotations

from datastates.container import archive as container_archive
from datastates.errors import FormatError
from datastates.formats.archives import DATA, PICKLE, Archive, Read, open_archive, read_directory
from datastates.formats.legacy_parts import Parts, find_legacy_parts, is_legacy
from datastates.formats.record_file import Record

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
