"""The container file: a ZIP64 archive of stored records that ``torch.load`` opens, with an index at its tail.

This module does no I/O of its own. ``docs/format.md`` specifies the bytes. A file holds, in this order: one record for
each buffer of memory, placed by the planner; ``data.pkl``; ``byteorder``; ``version``; the index; the central directory
and its end records; the footer. The footer is the archive's comment. It gives the index's offset, length and checksum.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from datastates.container import zip_frames
from datastates.container.checksums import crc32
from datastates.container.index import FORMAT_VERSION, Index, encode_index
from datastates.container.nested_archives import ROOM, Nest
from datastates.container.records import Records
from datastates.errors import FormatError
from datastates.state.shards import StoredArray

_FOOTER = "datastates/{:02d} index={:016x}+{:016x} crc={:08x}"
_FOOTER_PATTERN = rb"datastates/(\d\d) index=([\da-f]{16})\+([\da-f]{16}) crc=([\da-f]{8})"
FOOTER_NBYTES = len(_FOOTER.format(0, 0, 0, 0))
GUESS = 1 << 16
"""Bytes at the end of a file that are read first to find the index."""
ENDING_NBYTES = zip_frames.ENDING_NBYTES + FOOTER_NBYTES


def encode_framing(records: Records, nest: Nest | None = None) -> memoryview:
    """Encode all bytes between the records' data, end to end.

    The fields of unknown checksums are zero and must be filled in later. With ``nest`` the bytes include the nested
    archives, except the last one's ending.
    """
    framing = zip_frames.encode_frames(records)
    if nest is not None:
        nest.put(framing, records)
    return framing


def pickle_place(records_end: int, nest: Nest | None = None) -> int:
    """File offset in bytes of the data of ``data.pkl``, given the offset where the records end."""
    return zip_frames.pickle_place(records_end, ROOM + nest.tail_nbytes if nest else 0)


def nest_of(index: Index) -> Nest | None:
    """The archives nested in a container's records; None where the container is not nested.

    Raises:
        FormatError: A record holds no array, so it cannot be an archive.
    """
    if not index.nested:
        return None
    table = index.shards
    records, rows = np.unique(table.record, return_index=True)
    if len(records) != len(index.records):
        raise FormatError("index: a record without an array cannot be an archive")
    nbytes = index.records.nbytes.tolist()
    return Nest(
        [
            StoredArray.within(row.record, nbytes[row.record], row.dtype.name, row.offset, row.shape, row.stride)
            for row in table.rows(rows.tolist())
        ]
    )


def encode_tail(index: Index, pickle: bytes, nest: Nest | None = None) -> tuple[bytes, int]:
    """Encode all bytes from ``index.records.end`` to the end of the file. Returns them, and the index's CRC-32.

    ``nest`` is the result of :func:`nest_of` for the index. A caller that has it already passes it to save time.
    """
    begin = index.records.end
    nest = nest or nest_of(index)
    nested = (ROOM, nest.tail(index.records)) if nest is not None else (0, b"")
    encoded = encode_index(index)
    small = ((zip_frames.PICKLE_NAME, pickle), *zip_frames.CONSTANTS, (zip_frames.INDEX_NAME, encoded))
    data, entries = zip_frames.encode_small(small, begin, nested)
    end = begin + len(data)
    directory = zip_frames.encode_directory(index.records) + entries
    footer = _FOOTER.format(FORMAT_VERSION, end - len(encoded), len(encoded), crc32(encoded)).encode()
    ending = zip_frames.encode_ending(len(index.records) + len(small), end, len(directory), footer)
    return b"".join((data, directory, ending)), crc32(encoded)


def is_ending(tail: bytes) -> bool:
    """Whether a file's last bytes, some hundreds of them, end a container, even a damaged one."""
    return zip_frames.INDEX_NAME in tail or tail[-FOOTER_NBYTES:].startswith(b"datastates/")


def is_beginning(head: bytes) -> bool:
    """Whether a file's first bytes, some tens of them, begin a container that has records."""
    return head.startswith(b"PK\3\4") and head[30:].startswith(zip_frames.record_name(0))


Read = Callable[[int, int], bytes]
"""Given an offset and a length in bytes, returns these bytes of the file."""


@dataclass(frozen=True, slots=True)
class Footer:
    """A decoded footer. It describes the container's index: offset in the file, length in bytes, and CRC-32."""

    offset: int
    nbytes: int
    crc: int


def decode_footer(ending: bytes, file_nbytes: int) -> Footer:
    """Decode the footer, which is the last :data:`FOOTER_NBYTES` bytes of a file.

    Raises:
        FormatError: They are no footer, name an unknown format, or place the index beyond the end of the file.
    """
    fields = re.fullmatch(_FOOTER_PATTERN, ending[-FOOTER_NBYTES:])
    if fields is None:
        raise FormatError("not a datastates container, or one cut short: it does not end in a footer")
    version, (offset, nbytes, crc) = int(fields[1]), (int(number, 16) for number in fields.groups()[1:])
    if version != FORMAT_VERSION:
        raise FormatError(f"a container of format {version}; this reads format {FORMAT_VERSION}")
    if not offset + nbytes <= file_nbytes - ENDING_NBYTES:
        raise FormatError("the footer names an index that lies beyond the end of the file")
    return Footer(offset, nbytes, crc)


def find_index(ending: bytes, read: Read, file_nbytes: int) -> tuple[bytes, Footer]:
    """Find the encoded index of a container in the last bytes of the file, and compare it with its checksum.

    It reads again only when the index begins before them.

    Raises:
        FormatError: The file is no container, or a damaged one.
    """
    start = file_nbytes - len(ending)
    footer = decode_footer(ending, file_nbytes)
    if footer.offset >= start:
        data = ending[footer.offset - start : footer.offset - start + footer.nbytes]
    else:
        data = read(footer.offset, footer.nbytes)
    if crc32(data) != footer.crc:
        raise FormatError("the index does not match its checksum")
    return data, footer


def frame_ranges(index: Index) -> list[tuple[int, memoryview]]:
    """The stretches of bytes that must lie between the records' data: the file offset and the bytes of each."""
    encoded = encode_framing(index.records, nest_of(index))
    result = []
    position = begin = 0
    for data, nbytes in zip(index.records.data_offset.tolist(), index.records.nbytes.tolist(), strict=True):
        result.append((begin, encoded[position : position + data - begin]))
        position += data - begin
        begin = data + nbytes
    if len(encoded) > position:
        result.append((begin, encoded[position:]))
    return result
