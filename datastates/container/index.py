"""The index of a container, which lists its arrays and objects and their places. Decoding it checks every number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np

from datastates._base.cached import cached_property
from datastates._base.columns import I64, U32
from datastates._base.sizes import CHUNK, DESCRIPTOR
from datastates.container.key_table import PackedKeys
from datastates.container.records import Records
from datastates.container.table import ShardTable
from datastates.container.zip_frames import header_nbytes, pickle_place
from datastates.errors import FormatError

FORMAT_VERSION = 1
_MAX_STRING = 1 << 16
_MAX_CRC = 0xFFFFFFFF
_HASH, _MAX_HASH_NAME = 16, 64
"""Bytes of a hash, and the most characters of its name."""


Hashes: TypeAlias = "tuple[str, bytes, bytes]"
"""The name of a hash of 128 bits, the hashes of all chunks, and those of all arrays."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The place of an object in a container: the opcodes in ``data.pkl`` that push it.

    Attributes:
        provider: Number of its provider.
        key: Its key within the provider; empty when it is the provider's whole value.
        offset: File offset of the opcodes in bytes.
        nbytes: Length of the opcodes in bytes.
        crc: CRC-32 of the opcodes.
    """

    provider: int
    key: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, eq=False)
class Index:
    """The index of a container: its records, arrays and objects, and their places in the file.

    Attributes:
        identity: Tells this container from every other: ``step``, ``rank``, ``world_size`` and ``attempt``, a
            random name that all containers of one snapshot share.
        records: The storage records.
        chunk_crc: CRC-32 of each chunk of :data:`~datastates._base.sizes.CHUNK` bytes of each record, records end to
            end.
        shards: The arrays that lie in the records.
        objects: The objects in ``data.pkl``.
        pickle_offset, pickle_nbytes, pickle_crc: The place of the data of ``data.pkl`` in the file, and its CRC-32.
        nested: Whether each record is an archive by itself: see :mod:`datastates.container.nested_archives`.
        hashes: The hashes of 128 bits; None if there are none.
    """

    identity: dict[str, int | str]
    records: Records
    chunk_crc: U32
    shards: ShardTable
    objects: tuple[StoredObject, ...]
    pickle_offset: int
    pickle_nbytes: int
    pickle_crc: int
    nested: bool = False
    hashes: Hashes | None = None

    @cached_property
    def first_chunk(self) -> I64:
        """Number of each record's first checksum in ``chunk_crc``; the last entry is the total number of chunks."""
        counts = -(-self.records.nbytes.astype(np.int64) // CHUNK)
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


_TYPES = {
    "format": int,
    "chunk": int,
    "providers": list,
    "keys": bytes,
    "shards": dict,
    "objects": list,
    "pickle": list,
}
_TABLE_COLUMNS = {
    "provider": "<u4",
    "kind": "|u1",
    "dtype": "|u1",
    "record": "<u4",
    "offset": "<u8",
    "part": "|u1",
    "ndim": "|u1",
    "dims": "<u8",
    "strides": "<u8",
    "global_ndim": "|u1",
    "global_dims": "<u8",
    "place": "<u8",
    "digest": "<u4",
    "digested": "|u1",
}


def _column(data: object, dtype: str) -> np.ndarray[Any, Any]:
    if not isinstance(data, bytes) or len(data) % np.dtype(dtype).itemsize:
        raise FormatError("index: a column is not an array of numbers")
    return np.frombuffer(data, dtype)


def encode_index(index: Index) -> bytes:
    """Encode the index as columns: one msgpack map whose large values are little-endian arrays."""
    table = index.shards
    keys = table.packed_keys
    return msgpack.packb(
        {
            "format": FORMAT_VERSION,
            "identity": index.identity,
            "chunk": CHUNK,
            "header_offset": index.records.header_offset.astype("<u8").tobytes(),
            "data_offset": index.records.data_offset.astype("<u8").tobytes(),
            "record_nbytes": index.records.nbytes.astype("<u8").tobytes(),
            "record_crc": index.records.crc.astype("<u4").tobytes(),
            "chunk_crc": index.chunk_crc.astype("<u4").tobytes(),
            "providers": [p.encode("utf-8", "surrogatepass") for p in table.providers],
            "key_nbytes": keys.nbytes.astype("<u4").tobytes(),
            "keys": keys.data,
            "shards": {c: getattr(table, c).astype(width).tobytes() for c, width in _TABLE_COLUMNS.items()},
            "objects": [
                [o.provider, o.key.encode("utf-8", "surrogatepass"), o.offset, o.nbytes, o.crc] for o in index.objects
            ],
            "pickle": [index.pickle_offset, index.pickle_nbytes, index.pickle_crc],
            **({"nested": True} if index.nested else {}),
            **({} if index.hashes is None else {"hashes": index.hashes}),
        }
    )


def decode_index(data: bytes, file_nbytes: int) -> Index:
    """Decode an index and check every number in it against the others and the file's length.

    Raises:
        FormatError: It cannot be decoded, or contradicts itself or the file's length; the message says how.
    """
    try:
        fields = msgpack.unpackb(data, max_str_len=_MAX_STRING)
        if any(type(fields[n]) is not t for n, t in _TYPES.items()) or len(fields["pickle"]) != 3:
            raise FormatError("index: a field has the wrong type or length")
        if fields["format"] != FORMAT_VERSION or fields["chunk"] != CHUNK:
            raise FormatError(f"index: written by format {fields['format']!r:.40}, this reads {FORMAT_VERSION}")
        columns: dict[str, Any] = {c: _column(fields["shards"][c], width) for c, width in _TABLE_COLUMNS.items()}
        index = Index(
            identity=_identity(fields["identity"]),
            records=Records(
                header_offset=_column(fields["header_offset"], "<u8"),
                data_offset=_column(fields["data_offset"], "<u8"),
                nbytes=_column(fields["record_nbytes"], "<u8"),
                crc=_column(fields["record_crc"], "<u4"),
            ),
            chunk_crc=_column(fields["chunk_crc"], "<u4"),
            shards=ShardTable(
                providers=tuple(p.decode("utf-8", "surrogatepass") for p in fields["providers"]),
                keys=PackedKeys(fields["keys"], _column(fields["key_nbytes"], "<u4")),
                **columns,
            ),
            objects=tuple(
                StoredObject(provider, key.decode("utf-8", "surrogatepass"), offset, nbytes, crc)
                for provider, key, offset, nbytes, crc in fields["objects"]
            ),
            pickle_offset=fields["pickle"][0],
            pickle_nbytes=fields["pickle"][1],
            pickle_crc=fields["pickle"][2],
            nested=_nested(fields),
            hashes=_hashes(fields),
        )
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"index: cannot be decoded ({type(error).__name__}: {error})") from error
    _check_records(index, file_nbytes)
    index.shards.check(index.records.nbytes)
    _check_objects(index, file_nbytes)
    return index


def _identity(fields: dict[str, int | str]) -> dict[str, int | str]:
    expected = {"step": int, "rank": int, "world_size": int, "attempt": str}
    if not isinstance(fields, dict) or {k: type(v) for k, v in fields.items()} != expected:
        raise FormatError("index: the identity is not step, rank, world_size and attempt")
    return fields


def _nested(fields: dict[str, Any]) -> bool:
    if "nested" in fields and fields["nested"] is not True:
        raise FormatError("index: nested is there and not true")
    return "nested" in fields


def _hashes(fields: dict[str, Any]) -> Hashes | None:
    if "hashes" not in fields:
        return None
    name, chunks, arrays = fields["hashes"]
    counts = len(fields["chunk_crc"]) // 4, len(fields["key_nbytes"]) // 4
    if (type(name), type(chunks), type(arrays)) != (str, bytes, bytes) or not 0 < len(name) <= _MAX_HASH_NAME:
        raise FormatError("index: hashes are no name and two columns")
    if (len(chunks), len(arrays)) != (_HASH * counts[0], _HASH * counts[1]):
        raise FormatError(f"index: hashes are not of {_HASH} bytes for each chunk and each array")
    return name, chunks, arrays


def _check_records(index: Index, file_nbytes: int) -> None:
    records, count = index.records, len(index.records)
    if any(len(c) != count for c in (records.header_offset, records.nbytes, records.crc)):
        raise FormatError("index: the records' columns differ in length")
    limit = np.uint64(file_nbytes)
    if count and max(records.data_offset.max(), records.nbytes.max(), records.header_offset.max()) > limit:
        raise FormatError("index: a record lies beyond the end of the file")
    header, data = records.header_offset.astype(np.int64), records.data_offset.astype(np.int64)
    end = data + records.nbytes.astype(np.int64) + DESCRIPTOR
    if count and (header[0] != 0 or (header[1:] != end[:-1]).any() or end[-1] > file_nbytes):
        raise FormatError("index: the records overlap, leave gaps, or lie beyond the end of the file")
    room = data - header
    if count and ((room < header_nbytes(count).astype(np.int64)) | (room > 0xFFFF)).any():
        raise FormatError("index: a record's local header is too short or too long")
    chunks = int(index.first_chunk[-1])
    if len(index.chunk_crc) != chunks:
        raise FormatError(f"index: {len(index.chunk_crc)} checksums for {chunks} chunks")


def _check_objects(index: Index, file_nbytes: int) -> None:
    begin, nbytes = index.pickle_offset, index.pickle_nbytes
    numbers = (
        begin,
        nbytes,
        index.pickle_crc,
        *(n for o in index.objects for n in (o.provider, o.offset, o.nbytes, o.crc)),
    )
    if not all(type(n) is int and 0 <= n <= max(file_nbytes, _MAX_CRC) for n in numbers):
        raise FormatError("index: an object's place is not a number within the file")
    room = pickle_place(records_end := index.records.end), pickle_place(records_end, 0xFFFF if index.nested else 0)
    if not room[0] <= begin <= room[1] or begin + nbytes > file_nbytes:
        raise FormatError("index: data.pkl is not where the records end")
    if len({(o.provider, o.key) for o in index.objects}) != len(index.objects):
        raise FormatError("index: two objects have the same key")
    for o in index.objects:
        if o.provider >= len(index.shards.providers) or not begin <= o.offset <= o.offset + o.nbytes <= begin + nbytes:
            raise FormatError(f"index: object {o.key!r} lies outside of data.pkl")
