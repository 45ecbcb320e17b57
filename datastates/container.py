"""The container file: a ZIP64 archive of stored records that ``torch.load`` opens, with an index at its tail.

Pure: bytes in, bytes out; ``docs/format.md`` is the contract. The order in the file is: one record for each buffer of
memory, laid out by the planner; ``data.pkl``; ``byteorder``; ``version``; the index; the central directory; the
footer, which is the archive's comment and names the index's place, length and checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from datastates import pickling
from datastates._native import crc32, crc32_combine
from datastates.errors import FormatError
from datastates.pickling import StoredArray
from datastates.plan import CHUNK, DESCRIPTOR, SMALL, U32, U64
from datastates.shard_table import ShardTable

__all__ = ["crc32", "crc32_combine"]  # the checksums of the format, for those who check it

FORMAT_VERSION = 1
ROOT = b"archive/"
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_ZIP64_LOCAL, _ZIP64_CENTRAL, _PADDING = 0x0001, 0x0001, 0x4246  # "FB": the padding field that torch uses
_NEEDS, _MADE_BY, _STREAMED, _EPOCH = 45, 0x031E, 0x0008, 0x0021
_UNKNOWN = 0xFFFFFFFF
_FOOTER = "datastates/{:02d} index={:016x}+{:016x} crc={:08x}"
FOOTER_NBYTES = len(_FOOTER.format(0, 0, 0, 0))
ENDING_NBYTES = _END64.size + _LOCATOR.size + _END.size + FOOTER_NBYTES
_MAX_INDEX_STRING = 1 << 16


def record_names(count: int) -> list[bytes]:
    """Names of the storage records, in file order, as torch gives them."""
    return [ROOT + b"data/%d" % i for i in range(count)]


def header_nbytes(count: int) -> U64:
    """Length of each storage record's shortest local header."""
    digits = np.array([len(n) for n in record_names(count)], np.uint64)
    return digits + np.uint64(_LOCAL.size + 20 + 4)


# --- the records' frames
# -----------------------------------------------------------------------------------------------


def _local_header(name: bytes, nbytes: int, length: int, *, crc: int, flags: int) -> bytes:
    extra = length - _LOCAL.size - len(name)
    head = _LOCAL.pack(b"PK\3\4", _NEEDS, flags, 0, 0, _EPOCH, crc, _UNKNOWN, _UNKNOWN, len(name), extra)
    zip64 = struct.pack("<HHQQ", _ZIP64_LOCAL, 16, nbytes, nbytes)
    return head + name + zip64 + struct.pack("<HH", _PADDING, extra - 24) + bytes(extra - 24)


def encode_frames(header_offset: U64, data_offset: U64, nbytes: U64, crc: U32 | None = None) -> bytes:
    """All bytes between the storage records' data, end to end: descriptors, local headers, padding.

    Without ``crc`` the descriptors' CRC fields are zero, for the executor to fill in as the data goes by.
    """
    frames = []
    descriptor = b""
    names = record_names(len(nbytes))
    columns = zip(names, header_offset.tolist(), data_offset.tolist(), nbytes.tolist(), strict=True)
    for i, (name, header, data, size) in enumerate(columns):
        frames.append(descriptor + _local_header(name, size, data - header, crc=0, flags=_STREAMED))
        descriptor = struct.pack("<4sIQQ", b"PK\7\x08", 0 if crc is None else int(crc[i]), size, size)
    return b"".join([*frames, descriptor])


# --- the index
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in ``data.pkl``: the place, in the file, of the opcodes that push it.

    Attributes:
        provider: Number of its provider.
        key: Its key within the provider; empty when it is the provider's whole value.
        offset: Where the opcodes begin in the file.
        nbytes: How many bytes they are.
        crc: Their CRC-32.
    """

    provider: int
    key: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, eq=False)
class Index:
    """What a container holds, and where.

    Attributes:
        identity: What tells this container from every other: ``step``, ``rank``, ``world_size`` and ``attempt``, a
        random
            name shared by all containers of one snapshot.
        header_offset, data_offset, record_nbytes, record_crc: The storage records, in file order.
        chunk_crc: CRC-32 of each chunk of :data:`~datastates.plan.CHUNK` bytes of each record, records end to end.
        shards: The arrays that lie in them.
        objects: The objects in ``data.pkl``.
        pickle_offset, pickle_nbytes, pickle_crc: Where the data of ``data.pkl`` is in the file, and its CRC-32.
    """

    identity: dict[str, int | str]
    header_offset: U64
    data_offset: U64
    record_nbytes: U64
    record_crc: U32
    chunk_crc: U32
    shards: ShardTable
    objects: tuple[StoredObject, ...]
    pickle_offset: int
    pickle_nbytes: int
    pickle_crc: int

    @property
    def records_end(self) -> int:
        """One past the last record's descriptor."""
        return int(self.data_offset[-1] + self.record_nbytes[-1]) + DESCRIPTOR if len(self.data_offset) else 0


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
}


def _pack_strings(strings: Sequence[str]) -> tuple[bytes, bytes]:
    encoded = [s.encode("utf-8", "surrogatepass") for s in strings]
    return np.array([len(e) for e in encoded], "<u4").tobytes(), b"".join(encoded)


def _unpack_strings(lengths: bytes, data: bytes) -> tuple[str, ...]:
    ends = np.cumsum(_column(lengths, "<u4").astype(np.int64)).tolist()
    if (ends[-1] if ends else 0) != len(data):
        raise FormatError("index: the lengths of the keys do not add up")
    return tuple(data[a:b].decode("utf-8", "surrogatepass") for a, b in zip([0, *ends], ends, strict=False))


def _column(data: object, dtype: str) -> np.ndarray[Any, Any]:
    if not isinstance(data, bytes) or len(data) % np.dtype(dtype).itemsize:
        raise FormatError("index: a column is not an array of numbers")
    return np.frombuffer(data, dtype)


def encode_index(index: Index) -> bytes:
    """Encode the index as columns: one msgpack map whose large values are little-endian arrays."""
    table = index.shards
    lengths, keys = _pack_strings(table.keys)
    return msgpack.packb(
        {
            "format": FORMAT_VERSION,
            "identity": index.identity,
            "chunk": CHUNK,
            "header_offset": index.header_offset.astype("<u8").tobytes(),
            "data_offset": index.data_offset.astype("<u8").tobytes(),
            "record_nbytes": index.record_nbytes.astype("<u8").tobytes(),
            "record_crc": index.record_crc.astype("<u4").tobytes(),
            "chunk_crc": index.chunk_crc.astype("<u4").tobytes(),
            "providers": [p.encode("utf-8", "surrogatepass") for p in table.providers],
            "key_nbytes": lengths,
            "keys": keys,
            "shards": {c: getattr(table, c).astype(width).tobytes() for c, width in _TABLE_COLUMNS.items()},
            "objects": [
                [o.provider, o.key.encode("utf-8", "surrogatepass"), o.offset, o.nbytes, o.crc] for o in index.objects
            ],
            "pickle": [index.pickle_offset, index.pickle_nbytes, index.pickle_crc],
        }
    )


def decode_index(data: bytes, file_nbytes: int) -> Index:
    """Decode an index and check every number in it against the others and the file's length.

    Raises:
        FormatError: Something contradicts; the message says what.
    """
    try:
        fields = msgpack.unpackb(data, max_str_len=_MAX_INDEX_STRING)
        if any(type(fields[n]) is not t for n, t in _TYPES.items()) or len(fields["pickle"]) != 3:
            raise FormatError("index: a field is of another type")
        if fields["format"] != FORMAT_VERSION or fields["chunk"] != CHUNK:
            raise FormatError(f"index: written by format {fields['format']!r:.40}, this reads {FORMAT_VERSION}")
        index = Index(
            identity=_identity(fields["identity"]),
            header_offset=_column(fields["header_offset"], "<u8"),
            data_offset=_column(fields["data_offset"], "<u8"),
            record_nbytes=_column(fields["record_nbytes"], "<u8"),
            record_crc=_column(fields["record_crc"], "<u4"),
            chunk_crc=_column(fields["chunk_crc"], "<u4"),
            shards=ShardTable(
                providers=tuple(p.decode("utf-8", "surrogatepass") for p in fields["providers"]),
                keys=_unpack_strings(fields["key_nbytes"], fields["keys"]),
                **{c: _column(fields["shards"][c], width) for c, width in _TABLE_COLUMNS.items()},
            ),
            objects=tuple(
                StoredObject(provider, key.decode("utf-8", "surrogatepass"), offset, nbytes, crc)
                for provider, key, offset, nbytes, crc in fields["objects"]
            ),
            pickle_offset=fields["pickle"][0],
            pickle_nbytes=fields["pickle"][1],
            pickle_crc=fields["pickle"][2],
        )
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"index: cannot be decoded ({type(error).__name__}: {error})") from error
    _check_records(index, file_nbytes)
    index.shards.check(index.record_nbytes)
    _check_objects(index, file_nbytes)
    return index


def _identity(fields: dict[str, int | str]) -> dict[str, int | str]:
    expected = {"step": int, "rank": int, "world_size": int, "attempt": str}
    if not isinstance(fields, dict) or {k: type(v) for k, v in fields.items()} != expected:
        raise FormatError("index: the identity is not step, rank, world_size and attempt")
    return fields


def _check_records(index: Index, file_nbytes: int) -> None:
    count = len(index.data_offset)
    columns = (index.header_offset, index.record_nbytes, index.record_crc)
    if any(len(c) != count for c in columns):
        raise FormatError("index: the records' columns differ in length")
    limit = np.uint64(file_nbytes)
    if count and max(index.data_offset.max(), index.record_nbytes.max(), index.header_offset.max()) > limit:
        raise FormatError("index: a record lies beyond the end of the file")
    header, data = index.header_offset.astype(np.int64), index.data_offset.astype(np.int64)
    end = data + index.record_nbytes.astype(np.int64) + DESCRIPTOR
    if count and (header[0] != 0 or (header[1:] != end[:-1]).any() or end[-1] > file_nbytes):
        raise FormatError("index: the records overlap, leave gaps, or lie beyond the end of the file")
    room = data - header
    if count and ((room < header_nbytes(count).astype(np.int64)) | (room > 0xFFFF)).any():
        raise FormatError("index: a record's data lies where its header must be")
    chunks = int((-(-index.record_nbytes.astype(np.int64) // CHUNK)).sum())
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
    if not all(type(n) is int and 0 <= n <= max(file_nbytes, _UNKNOWN) for n in numbers):
        raise FormatError("index: an object's place is not a number within the file")
    if begin != pickle_place(index.records_end) or begin + nbytes > file_nbytes:
        raise FormatError("index: data.pkl is not where the records end")
    if len({(o.provider, o.key) for o in index.objects}) != len(index.objects):
        raise FormatError("index: two objects have the same key")
    for o in index.objects:
        if o.provider >= len(index.shards.providers) or not begin <= o.offset <= o.offset + o.nbytes <= begin + nbytes:
            raise FormatError(f"index: object {o.key!r} lies outside of data.pkl")


# --- data.pkl
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProviderState:
    """What ``data.pkl`` says of one provider.

    Attributes:
        name: The provider's name: a top-level key.
        whole: The pickle of its whole value; None when the value is a mapping of the items.
        items: By key, the pickle of an object, or where an array is stored.
    """

    name: str
    whole: bytes | None
    items: tuple[tuple[str, bytes | StoredArray], ...] = ()


def encode_pickle(states: Sequence[ProviderState], offset: int) -> tuple[bytes, tuple[StoredObject, ...]]:
    """Splice the providers' pickles into one ``data.pkl`` that will lie at ``offset``, and say where each object is."""
    parts = [pickling.stream(b"")[:-1], pickling.MAPPING_BEGIN]
    position = offset + sum(map(len, parts))
    objects = []

    def add(data: bytes) -> None:
        nonlocal position
        parts.append(data)
        position += len(data)

    def add_object(provider: int, key: str, stream: bytes) -> None:
        spliced = pickling.body(stream)
        objects.append(StoredObject(provider, key, position, len(spliced), crc32(spliced)))
        add(spliced)

    for number, state in enumerate(states):
        add(pickling.mapping_frame(state.name))
        if state.whole is not None:
            add_object(number, "", state.whole)
            continue
        add(pickling.MAPPING_BEGIN)
        for key, item in state.items:
            add(pickling.mapping_frame(key))
            if isinstance(item, bytes):
                add_object(number, key, item)
            else:
                add(pickling.encode_array(item))
        add(pickling.MAPPING_END)
    add(pickling.MAPPING_END + b".")
    return b"".join(parts), tuple(objects)


# --- the tail
# ----------------------------------------------------------------------------------------------------------

_PICKLE_NAME = ROOT + b"data.pkl"
_INDEX_NAME = ROOT + b".datastates/index"


def pickle_place(records_end: int) -> int:
    """Where the data of ``data.pkl`` begins, given where the records end."""
    return _aligned(records_end + _LOCAL.size + len(_PICKLE_NAME) + 24)


def _aligned(offset: int) -> int:
    return -(-offset // SMALL) * SMALL


def encode_tail(index: Index, pickle: bytes) -> tuple[bytes, int]:
    """Everything from ``index.records_end`` to the end of the file, and the index's CRC-32."""
    begin = index.records_end
    parts: list[bytes] = []
    position = begin
    entries: list[tuple[bytes, int, int, int, int]] = [
        (name, _STREAMED, crc, nbytes, header)
        for name, crc, nbytes, header in zip(
            record_names(len(index.data_offset)),
            index.record_crc.tolist(),
            index.record_nbytes.tolist(),
            index.header_offset.tolist(),
            strict=True,
        )
    ]
    encoded = encode_index(index)
    index_offset = 0
    for name, data in (
        (_PICKLE_NAME, pickle),
        (ROOT + b"byteorder", b"little"),
        (ROOT + b"version", b"3\n"),
        (_INDEX_NAME, encoded),
    ):
        length = _aligned(position + _LOCAL.size + len(name) + 24) - position
        crc = crc32(data)
        entries.append((name, 0, crc, len(data), position))
        parts += [_local_header(name, len(data), length, crc=crc, flags=0), data]
        index_offset = position + length
        position += length + len(data)
    directory = b"".join(_central_header(*entry) for entry in entries)
    parts.append(directory)
    parts.append(_ending(len(entries), position, len(directory), index_offset, encoded))
    return b"".join(parts), crc32(encoded)


def _central_header(name: bytes, flags: int, crc: int, nbytes: int, offset: int) -> bytes:
    head = _CENTRAL.pack(
        b"PK\1\2", _MADE_BY, _NEEDS, flags, 0, 0, _EPOCH, crc, _UNKNOWN, _UNKNOWN, len(name), 28, 0, 0, 0, 0, _UNKNOWN
    )
    return head + name + struct.pack("<HHQQQ", _ZIP64_CENTRAL, 24, nbytes, nbytes, offset)


def _ending(entries: int, offset: int, nbytes: int, index_offset: int, index: bytes) -> bytes:
    footer = _FOOTER.format(FORMAT_VERSION, index_offset, len(index), crc32(index)).encode()
    end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY, _NEEDS, 0, 0, entries, entries, nbytes, offset)
    locator = _LOCATOR.pack(b"PK\6\7", 0, offset + nbytes, 1)
    end = _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _UNKNOWN, _UNKNOWN, len(footer))
    return end64 + locator + end + footer


# --- opening
# -----------------------------------------------------------------------------------------------------------

Read = Callable[[int, int], bytes]
"""Reads (offset, length) of the file."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The last bytes of a container: where its index is."""

    offset: int
    nbytes: int
    crc: int


def decode_footer(ending: bytes, file_nbytes: int) -> Footer:
    """Find the index from a file's last :data:`FOOTER_NBYTES` bytes; raises FormatError when they are no footer."""
    try:
        text = ending[-FOOTER_NBYTES:].decode("ascii")
        version, offset, nbytes, crc = (
            int(text[11:13]),
            int(text[20:36], 16),
            int(text[37:53], 16),
            int(text[58:66], 16),
        )
        if text != _FOOTER.format(version, offset, nbytes, crc):
            raise ValueError(text)
    except (ValueError, IndexError):
        raise FormatError("not a datastates container, or one cut short: it does not end in a footer") from None
    if version != FORMAT_VERSION:
        raise FormatError(f"a container of format {version}; this reads format {FORMAT_VERSION}")
    if not offset + nbytes <= file_nbytes - ENDING_NBYTES:
        raise FormatError("the footer names an index that lies beyond the end of the file")
    return Footer(offset, nbytes, crc)


def open_index(read: Read, file_nbytes: int, *, guess: int = 1 << 16) -> tuple[Index, Footer]:
    """Read and check the index of a container: one read of the file's end, a second only when the index is long.

    Raises:
        FormatError: It is no container, or a damaged one.
    """
    start = max(0, file_nbytes - guess)
    ending = read(start, file_nbytes - start)
    footer = decode_footer(ending, file_nbytes)
    if footer.offset >= start:
        data = ending[footer.offset - start : footer.offset - start + footer.nbytes]
    else:
        data = read(footer.offset, footer.nbytes)
    if crc32(data) != footer.crc:
        raise FormatError("the index does not match its checksum")
    return decode_index(data, file_nbytes), footer


def frame_ranges(index: Index) -> list[tuple[int, bytes]]:
    """Every stretch between the storage records' data as it must be: (offset in the file, bytes)."""
    frames = encode_frames(index.header_offset, index.data_offset, index.record_nbytes, index.record_crc)
    result = []
    position = begin = 0
    for data, nbytes in zip(index.data_offset.tolist(), index.record_nbytes.tolist(), strict=True):
        result.append((begin, frames[position : position + data - begin]))
        position += data - begin
        begin = data + nbytes
    if len(frames) > position:
        result.append((begin, frames[position:]))
    return result
