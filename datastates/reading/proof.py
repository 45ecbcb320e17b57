"""Compares records that have no checksums of chunks with a checksum of the whole record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from datastates.container import checksums
from datastates.container.digests import contribution, digest_of
from datastates.container.table import Row
from datastates.reading.tensors import TensorFile
from datastates.state import arrays, memory
from datastates.state.strides import is_row_major
from datastates.storage.stores import reader

Check = Callable[[], None]
"""A function that is called when all reads have ended, and verifies bytes that had no checksum during the reads."""
_STEP = 4 << 20
"""Bytes to read at a time to verify a record."""


def check_block(source: TensorFile, record: int, block: Any) -> None:
    """Compare a record that was read with its checksum, unless its chunks were verified or only a part was read.

    Args:
        source: The file.
        record: The number of the record.
        block: The bytes that were read, as an array on any device.

    Raises:
        CorruptError: The bytes do not match the checksum; the message names tensors in the record.
    """
    crc = None if source.checked else source.record_crc(record)
    if crc is None or block.nbytes != int(source.record_nbytes[record]):
        return
    if checksums.crc32(block.cpu().numpy() if arrays.kind_of(block) == "torch" else block) != crc:
        raise source.corrupt(source.name_record(record))


def check_record(source: TensorFile, record: int, key: str) -> bool:
    """Read a record of a file without chunk checksums, and compare it with the checksum of the record, if there is one.

    Args:
        source: The file.
        record: The number of the record.
        key: The key of the tensor that the error names.

    Returns:
        Whether the record has a checksum.

    Raises:
        CorruptError: The record does not match its checksum.
        StorageError: Reading failed.
    """
    expected = source.record_crc(record)
    if expected is not None and crc_of_record(source, record) != expected:
        raise source.corrupt(key)
    return expected is not None


def crc_of_record(source: TensorFile, record: int, progress: Callable[[int], object] = lambda _: None) -> int:
    """CRC-32 of a record's data, read step by step; ``progress`` is called with the bytes of each step."""
    read, begin, end = reader(source.path), int(source.data_offset[record]), int(source.record_nbytes[record])
    crc = 0
    for at in range(0, end, _STEP):
        data = read(begin + at, min(_STEP, end - at))
        crc = checksums.crc32(data, crc)
        progress(len(data))
    return crc


def check_parts(key: str, array: Any, sources: Sequence[tuple[TensorFile, Row]]) -> None:
    """Compare the parts of a tensor that was read with the checksums of their records, unless chunks were verified.

    Only a part that is a whole record in row-major order can be compared.

    Args:
        key: The full key of the tensor.
        array: The tensor, put together from all its parts, on any device.
        sources: The stored parts, each with its file.

    Raises:
        CorruptError: A part does not match the checksum of its record.
    """
    for source, row in sources:
        crc = None if source.checked else source.record_crc(row.record)
        nbytes = math.prod(row.shape) * row.dtype.itemsize
        if crc is None or nbytes != int(source.record_nbytes[row.record]) or not is_row_major(row.shape, row.stride):
            continue
        if row.flat is not None:
            part = array.reshape(-1)[row.flat[0] : row.flat[1]]
        else:
            part = memory.region(array, row.box or (), row.shape)
        if digest_of(contribution(arrays.array_shard(key, part)), nbytes) != crc:
            raise source.corrupt(key)
