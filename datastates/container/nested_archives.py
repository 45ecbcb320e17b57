"""Nested archives: each record of a nested container is also an archive of its own, as ``torch.save`` writes a tensor.

torch.distributed.checkpoint and Megatron-Core read a stretch of a file that is such an archive. The archive shares the
record's data and descriptor with the container. Its other bytes lie in the padding of the container's local headers.
The padding before the data holds the archive's other records and its own local header for the data. The padding of the
next local header holds its central directory and end records. ``docs/format.md`` specifies the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from datastates._base.columns import I64, U64
from datastates._base.sizes import DESCRIPTOR, DESCRIPTOR_CRC
from datastates.container import pickle_writer, zip_frames
from datastates.container.records import Records
from datastates.errors import FormatError
from datastates.state.shards import StoredArray

ROOM = 80
"""Offset of the nested bytes in a local header; the header's own fields are always shorter."""
CRC_PLACES = (DESCRIPTOR_CRC, DESCRIPTOR + ROOM + zip_frames.CENTRAL_CRC)
"""Offsets of a record's CRC-32 from its descriptor's begin: in the descriptor, and in its archive's directory."""


_NAME = zip_frames.record_name(0)


@dataclass(frozen=True, slots=True)
class _Archive:
    """A tensor's archive without the tensor: its other records, end to end, and their entries for the directory."""

    leading: bytes
    entries: tuple[tuple[bytes, int, int, int], ...]
    """For each of these records: name, CRC-32 and length of its data, and where in ``leading`` its header is."""

    @classmethod
    def of(cls, array: StoredArray) -> _Archive:
        """Make the archive of a tensor, with the records that ``torch.save`` writes."""
        leading, entries = b"", []
        alone = replace(array, record="0")
        for name, data in (
            (zip_frames.PICKLE_NAME, pickle_writer.stream(pickle_writer.encode_array(alone))),
            *zip_frames.CONSTANTS,
        ):
            crc, length = crc32(data), zip_frames.shortest_header(name)
            entries.append((name, crc, len(data), len(leading)))
            leading += zip_frames.local_header(name, len(data), length, crc=crc, flags=0) + data
        return cls(leading, tuple(entries))

    @property
    def nbytes(self) -> int:
        """Fewest bytes before the tensor's data: the records, and the shortest local header of the data."""
        return len(self.leading) + zip_frames.shortest_header(_NAME)

    def beginning(self, nbytes: int, length: int) -> bytes:
        """All bytes before the data of ``nbytes`` bytes, padded to ``length``."""
        header = zip_frames.local_header(_NAME, nbytes, length - len(self.leading), crc=0, flags=zip_frames.STREAMED)
        return self.leading + header

    def ending(self, nbytes: int, crc: int, at: int) -> bytes:
        """The central directory, which begins at ``at`` in the archive, and the end records behind it."""
        entries = [
            zip_frames.central_header(_NAME, zip_frames.STREAMED, crc, nbytes, len(self.leading)),
            *(zip_frames.central_header(name, 0, c, n, offset) for name, c, n, offset in self.entries),
        ]
        directory = b"".join(entries)
        return directory + zip_frames.encode_ending(len(entries), at, len(directory), b"")


class Nest:
    """The archives of a container's records.

    Attributes:
        header_nbytes: Length of each record's shortest local header, nested bytes included.
        tail_nbytes: Length of the last archive's ending, which begins at :data:`ROOM` in the header after the records.
    """

    def __init__(self, arrays: Sequence[StoredArray]) -> None:
        """Plan the archives of these arrays, one for each record, in file order."""
        self._archives = [_Archive.of(array) for array in arrays]
        self._ending = np.array([len(archive.ending(0, 0, 0)) for archive in self._archives], np.int64)
        # a header's padding holds the ending of the previous record's archive, then the beginning of this record's
        self._leading_at = ROOM + np.concatenate((np.zeros(1, np.int64), self._ending))[: len(arrays)]
        leading = np.array([archive.nbytes for archive in self._archives], np.int64)
        self.header_nbytes: U64 = (self._leading_at + leading).astype(np.uint64)
        self.tail_nbytes = int(self._ending[-1]) if len(arrays) else 0

    def places(self, records: Records) -> tuple[I64, I64]:
        """The file offset and the length of each archive, in bytes."""
        header = records.header_offset.astype(np.int64)
        begin = header + self._leading_at
        return begin, np.append(header, records.end)[1:] + ROOM + self._ending - begin

    def put(self, framing: memoryview, records: Records) -> None:
        """Write all nested bytes, except the last archive's ending, into frames of :func:`zip_frames.encode_frames`.

        Raises:
            FormatError: A local header is too short for the nested bytes.
        """
        length = records.data_offset.astype(np.int64) - records.header_offset.astype(np.int64)
        if (length < self.header_nbytes.astype(np.int64)).any():
            raise FormatError("index: a record's header has no room for what is nested in it")
        at = (np.cumsum(length + DESCRIPTOR) - DESCRIPTOR - length).tolist()
        for i, archive in enumerate(self._archives):
            begin, end = at[i] + int(self._leading_at[i]), at[i] + int(length[i])
            framing[begin:end] = archive.beginning(int(records.nbytes[i]), end - begin)
            if i + 1 < len(self._archives):
                ending = self._ending_of(i, records, int(records.header_offset[i + 1]))
                framing[at[i + 1] + ROOM : at[i + 1] + ROOM + len(ending)] = ending

    def tail(self, records: Records) -> bytes:
        """The last archive's ending; empty without archives."""
        return self._ending_of(len(self._archives) - 1, records, records.end) if self._archives else b""

    def _ending_of(self, i: int, records: Records, next_header: int) -> bytes:
        at = next_header + ROOM - int(records.header_offset[i]) - int(self._leading_at[i])
        return self._archives[i].ending(int(records.nbytes[i]), int(records.crc[i]), at)
