"""A file of torch's own writer of DCP: archives of one tensor each, and bare bytes, one after another.

Such a file has no index. The end of each archive tells the place of the tensor's bytes and their one checksum; the
beginning tells the tensor's type and shape.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datastates.container import checksums
from datastates.container.table import Row
from datastates.errors import FormatError
from datastates.formats.archive_ends import opened_ends
from datastates.formats.archives import ArchivedTensor, find_tensor
from datastates.formats.dcp_wanted import ClaimedMemory, Wanted, is_memory, queue_box
from datastates.formats.record_file import Record, RecordFile, overlap
from datastates.reading.reads import Reads, Tally
from datastates.state import arrays, dtypes, strides
from datastates.state.shards import StoredArray
from datastates.state.strides import is_dense, span
from datastates.storage import Location
from datastates.storage.stores import reader

_STEP = 32 << 20
"""Bytes of a tensor that are copied to the host at a time, to be verified."""


@dataclass(frozen=True, slots=True)
class _Record(Record):
    """A range of the file that can be read in parts: the storage of a tensor, or bare bytes."""

    key: str
    array: StoredArray

    @property
    def is_filled(self) -> bool:
        """Whether the tensor's elements span the whole record."""
        itemsize = dtypes.BY_NAME[self.array.dtype].itemsize
        return self.array.offset == 0 and span(self.array.shape, self.array.stride) * itemsize == self.nbytes


class StockFile(RecordFile):
    """A file of torch's own writer: a :class:`Source` whose records are the needed parts of the file.

    A tensor that is read as a whole is verified once it is in place. A part of a tensor is not verified: the checksum
    covers the whole tensor, and reading all of it would undo the gain of reading ranges.
    """

    records: Sequence[_Record]

    def __init__(self, path: Location, nbytes: int, wanted: Sequence[Wanted], claims: ClaimedMemory) -> None:
        """Find the wanted items in a file; items that cannot be read in ranges are left to torch.

        Args:
            path: The file.
            nbytes: Its length.
            wanted: The items to load from it. Nothing else is looked at.
            claims: The memory that one load, from all its files, reads into; this file adds to it.

        Raises:
            FormatError: An archive contradicts itself; the message names the tensor.
            StorageError: Reading failed.
        """
        self._claims = claims
        self._whole: list[tuple[int, Any]] = []
        plain = {one.place: one for one in wanted if not one.is_transformed}
        self.path = path
        found = sorted(self._find(plain), key=lambda of: of[1].offset)
        super().__init__(path, nbytes, [record for _, record in found])
        # records that overlap: leave all items to torch
        self._numbers = {} if overlap(self.records, nbytes) else {place: n for n, (place, _) in enumerate(found)}

    def _find(self, wanted: dict[tuple[int, int], Wanted]) -> Iterator[tuple[tuple[int, int], _Record]]:
        archives = []
        for (offset, length), one in wanted.items():
            if one.is_bytes:
                data = StoredArray("", "uint8", 0, (length,), (1,), length)
                yield (offset, length), _Record(offset, length, None, one.key, data)
            else:
                archives.append((offset, length))
        for (offset, length), read in opened_ends(reader(self.path), sorted(archives)):
            key = wanted[offset, length].key
            try:
                tensor: ArchivedTensor | None = find_tensor(read, length)
            except FormatError as error:
                raise FormatError(f"{key!r} in {self.path} is damaged: {error}") from None
            if tensor is not None:
                record = _Record(offset + tensor.offset, tensor.nbytes, tensor.crc, key, tensor.array)
                yield (offset, length), record

    def name_record(self, record: int) -> str:
        """The key of the array in a record, for messages."""
        return self.records[record].key

    def queue(self, reads: Reads, wanted: Wanted) -> Callable[[], None] | None:
        """Plan to read one item.

        Args:
            reads: The reads of this load, to add to.
            wanted: The item.

        Returns:
            A function to call once the item has been read; None if torch has to read the item.

        Raises:
            ValueError: The tensor has another shape than the item.
        """
        import torch

        number = self._numbers.get(wanted.place)
        if number is None or wanted.is_transformed:
            return None
        record = self.records[number]
        array = record.array
        if wanted.is_bytes:
            data = torch.empty(record.nbytes, dtype=torch.uint8, device="cpu")
            reads.add(self, self._row(number, array.shape, array.stride), arrays.destination(record.key, data))
            return lambda: wanted.take(io.BytesIO(data.numpy().tobytes()))
        if len(array.shape) != len(wanted.lengths) or any(
            begin + length > size
            for begin, length, size in zip(wanted.within, wanted.lengths, array.shape, strict=True)
        ):
            return None  # not the tensor that the checkpoint's metadata describes
        if wanted.lengths == array.shape and record.is_filled and record.crc is not None:
            return self._queue_whole(reads, number, wanted)
        row = self._row(number, array.shape, array.stride, array.begin)
        return queue_box(reads, self, row, wanted, self._claims)

    def _queue_whole(self, reads: Reads, number: int, wanted: Wanted) -> Callable[[], None]:
        """As :meth:`queue`, for a whole record. It is read with the file's layout, so that it can be verified."""
        import torch

        record = self.records[number]
        array, dtype = record.array, getattr(torch, record.array.dtype)
        target = wanted.target()
        count = span(array.shape, array.stride)
        # tensors that share memory were stored separately and may differ: only one is read in place, and verified there
        in_place = is_memory(target, dtype) and _lies_as(target, array) and self._claims.claim(target)
        flat = target.as_strided((count,), (1,)) if in_place else torch.empty(count, dtype=dtype, device="cpu")
        reads.add(self, self._row(number, (count,), (1,)), arrays.destination(record.key, flat))
        self._whole.append((number, flat))

        def end() -> None:
            if not in_place:
                target.copy_(flat.as_strided(array.shape, array.stride))
            wanted.filled(target)

        return end

    def _row(self, number: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Row:
        record = self.records[number]
        dtype = dtypes.BY_NAME[record.array.dtype]
        return Row(record.key, "torch", dtype, number, offset, shape, stride, shape, (0,) * len(shape), None, None)

    def verify(self, tally: Tally) -> Tally:
        """Compare the tensors that were read as a whole with their checksums.

        Args:
            tally: The amount that the load read.

        Returns:
            The tally, in which these tensors count as verified.

        Raises:
            CorruptError: A tensor does not match its checksum; the message names it. It is overwritten by then.
        """
        import torch

        for number, flat in self._whole:
            record, crc, data = self.records[number], 0, flat.view(torch.uint8)
            for at in range(0, record.nbytes, _STEP):
                piece: Any = data[at : at + _STEP].cpu().numpy()
                crc = checksums.crc32(piece, crc)
            if crc != record.crc:
                raise self.corrupt(record.key)
        verified = [self.records[number] for number in {number for number, _ in self._whole}]
        names = {record.key for record in verified}
        return replace(
            tally,
            unverified_nbytes=tally.unverified_nbytes - sum(record.nbytes for record in verified),
            unverified_keys=tuple(key for key in tally.unverified_keys if key not in names),
        )


def _lies_as(target: Any, array: StoredArray) -> bool:
    """Whether a tensor has the same layout in memory as ``array``, which fills its storage, has in the file."""
    if target.is_conj() or target.is_neg() or not is_dense(array.shape, array.stride):
        return False
    row_major = strides.is_row_major(array.shape, array.stride) and target.is_contiguous()
    return bool(row_major or target.stride() == array.stride)
