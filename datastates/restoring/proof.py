"""Compares what was read without checksums on the way with a checksum of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datastates.container import checksums
from datastates.container.digests import contribution
from datastates.container.table import Row
from datastates.errors import CorruptError
from datastates.restoring.sources import TensorFile, Tensors
from datastates.state import arrays


def check_block(source: TensorFile, record: int, key: str, block: Any) -> None:
    """Compare a block of bytes with the checksum of its record, if it is the whole record and was not verified yet.

    Args:
        source: The file.
        record: The number of the record.
        key: Names what is read in the message of the error.
        block: An array of bytes on any device.

    Raises:
        CorruptError: They differ.
    """
    crc = None if source.checked else source.record_crc(record)
    if crc is not None and block.nbytes == int(source.record_nbytes[record]) and _crc_of_block(block) != crc:
        raise _corrupt(key, str(source.path))


def _crc_of_block(block: Any) -> int:
    if arrays.kind_of(block) == "torch":
        block = block.cpu().numpy()
    return checksums.crc32(block)


def check_tensor(tensors: Tensors, key: str, array: Any, sources: Sequence[tuple[TensorFile, Row]]) -> None:
    """Compare a tensor that was put together from files without checksums of chunks with its digest, if it has one.

    Raises:
        CorruptError: They differ.
    """
    if all(source.checked for source, _ in sources):
        return
    contributed = tensors.digest(key)
    if contributed is not None and contribution(arrays.array_shard(key, array)) != contributed:
        raise _corrupt(key, str(tensors.path))


def _corrupt(key: str, path: str) -> CorruptError:
    return CorruptError(f"{key!r} in {path} does not match its checksum", key=key, path=path)
