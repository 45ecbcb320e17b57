"""A reader written from docs/format.md alone: zipfile, struct, zlib, json and msgpack; torch opens nested archives."""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
import zipfile
import zlib
from itertools import product
from typing import Any

import msgpack
import torch

ITEMSIZE = (8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16, 2, 4, 8, 4, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, *[1] * 8)
CODES = {0: "<d", 1: "<f", 2: "<e", 4: "<q", 5: "<i", 6: "<h", 7: "<b", 8: "<B", 9: "<?", 12: "<H", 13: "<I", 14: "<Q"}
CHUNK = 262144
_WITH_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
STORAGES = {code: f"{name}Storage" for code, name in enumerate((*_WITH_STORAGES, "ComplexFloat", "ComplexDouble"))}
NAMES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
]


def read_manifest(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(data)
    assert data == (json.dumps(fields, indent=2) + "\n").encode("ascii")
    crc = fields.pop("crc32")
    assert crc == zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii"))
    names = ["format", "step", "sequence", "attempt", "created", "world_size", "containers"]
    if fields["format"] == 1:
        names.remove("sequence")
    if "metric" in fields:
        names.insert(names.index("world_size"), "metric")
        assert type(fields["metric"]) is float
        assert math.isfinite(fields["metric"])
    ranks = [c["rank"] for c in fields["containers"]]
    for c in fields["containers"][fields["world_size"] :]:
        assert list(c)[:6] == ["file", "rank", "nbytes", "index_crc32", "step", "attempt"]
        assert list(c)[6:] in ([], ["folder"])
    own, kept = ranks[: fields["world_size"]], ranks[fields["world_size"] :]
    assert list(fields) == names + (["catalog"] if len(ranks) > 1 else [])
    assert fields["format"] in ((3,) if kept else (1, 2))
    assert own == list(range(fields["world_size"]))
    assert kept == sorted({*kept} & {*own})
    return fields


def read_index(data: bytes) -> tuple[dict[str, Any], int, int]:
    """The index, its offset and its CRC-32, found through the footer."""
    footer = data[-66:].decode("ascii")
    assert footer.startswith("datastates/01 index=")
    offset, nbytes, crc = int(footer[20:36], 16), int(footer[37:53], 16), int(footer[58:66], 16)
    assert footer == f"datastates/01 index={offset:016x}+{nbytes:016x} crc={crc:08x}"
    assert offset + nbytes <= len(data) - 164
    encoded = data[offset : offset + nbytes]
    assert zlib.crc32(encoded) == crc
    return msgpack.unpackb(encoded), offset, crc


def numbers(data: bytes, width: int) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // width}{' BH I   Q'[width]}", data)


def cut(data: Any, lengths: Any) -> list[Any]:
    parts, at = [], 0
    for n in lengths:
        parts.append(data[at : at + n])
        at += n
    assert at == len(data)
    return parts


def read_records(data: bytes, index: dict[str, Any]) -> list[bytes]:
    """The data of the storage records; every header, descriptor and checksum is compared."""
    columns = [
        numbers(index[n], w)
        for n, w in (("header_offset", 8), ("data_offset", 8), ("record_nbytes", 8), ("record_crc", 4))
    ]
    counts = [-(-n // index["chunk"]) for n in columns[2]]
    records, position = [], 0
    archives = read_archives(data, index) if index.get("nested") else {}
    for i, (header, begin, nbytes, crc, chunks) in enumerate(
        zip(*columns, cut(numbers(index["chunk_crc"], 4), counts), strict=True)
    ):
        assert header == position
        name = f"archive/data/{i}".encode()
        padding = begin - header - 30 - len(name) - 24
        assert data[header:begin] == local_header(name, 8, 0, nbytes, archives.get(i, bytes(padding)))
        record = data[begin : begin + nbytes]
        assert zlib.crc32(record) == crc
        assert [zlib.crc32(record[a : a + CHUNK]) for a in range(0, nbytes, CHUNK)] == list(chunks)
        position = begin + nbytes + 24
        assert data[begin + nbytes : position] == struct.pack("<4sI2Q", b"PK\7\x08", crc, nbytes, nbytes)
        records.append(record)
    own = 30 + 16 + 24
    if index.get("nested"):
        own = 80 + (len(archives[len(records)]) if records else 0)
        assert data[position + 80 : position + own] == archives.get(len(records), b"")
        assert not any(data[position + 70 : position + 80] + data[position + own : index["pickle"][0]])
    assert index["pickle"][0] == -(-(position + own) // 64) * 64
    return records


def local_header(name: bytes, flags: int, crc: int, nbytes: int, padding: bytes = b"") -> bytes:
    unknown, more = 2**32 - 1, len(padding)
    fixed = struct.pack("<4s5H3I2H", b"PK\3\4", 45, flags, 0, 0, 0x21, crc, unknown, unknown, len(name), 24 + more)
    return fixed + name + struct.pack("<2H2Q2H", 1, 16, nbytes, nbytes, 0x4246, more) + padding


def central_header(name: bytes, flags: int, crc: int, nbytes: int, offset: int) -> bytes:
    unknown = 2**32 - 1
    fields = (0x031E, 45, flags, 0, 0, 0x21, crc, unknown, unknown, len(name), 28, 0, 0, 0, 0, unknown)
    return struct.pack("<4s6H3I5H2I", b"PK\1\2", *fields) + name + struct.pack("<2H3Q", 1, 24, nbytes, nbytes, offset)


def integer(n: int) -> bytes:
    assert n < 2**31
    return b"K" + bytes([n]) if n < 256 else b"M" + struct.pack("<H", n) if n < 65536 else b"J" + struct.pack("<i", n)


def integers(several: Any) -> bytes:
    return b"(" + b"".join(map(integer, several)) + b"t"


def text(s: str) -> bytes:
    return b"X" + struct.pack("<I", len(s)) + s.encode()


def array_pickle(dtype: int, elements: int, offset: int, shape: Any, stride: Any) -> bytes:
    """What ``torch.save`` writes for a tensor in record 0, in the form that the format's page gives."""
    size = ITEMSIZE[dtype]
    storage = STORAGES.get(8 if dtype >= 27 else dtype)  # what torch lacks is written as uint8
    name = f"ctorch\n{storage}\n" if storage else "ctorch.storage\nUntypedStorage\n"
    return (
        (b"ctorch._utils\n_rebuild_tensor_v2\n((" if storage else b"ctorch._utils\n_rebuild_tensor_v3\n((")
        + text("storage")
        + name.encode()
        + text("0")
        + text("cpu")
        + integer(elements if storage else elements * size)
        + b"tQ"
        + integer(offset // size)
        + integers(shape)
        + integers(stride)
        + b"\x89ccollections\nOrderedDict\n)R"
        + (b"" if storage else f"ctorch\n{NAMES[dtype]}\n".encode())
        + b"tR"
    )


def read_archives(data: bytes, index: dict[str, Any]) -> dict[int, bytes]:
    """The padding that each record's local header must have, by record number; last, the last archive's ending."""
    shards = index["shards"]
    header, begin, nbytes = (numbers(index[n], 8) for n in ("header_offset", "data_offset", "record_nbytes"))
    crcs = numbers(index["record_crc"], 4)
    ndim = numbers(shards["ndim"], 1)
    shapes, strides = (cut(numbers(shards[n], 8), ndim) for n in ("dims", "strides"))
    rows = zip(
        numbers(shards["record"], 4),
        numbers(shards["dtype"], 1),
        numbers(shards["offset"], 8),
        shapes,
        strides,
        strict=True,
    )
    held: dict[int, set[Any]] = {}
    for record, *row in rows:
        held.setdefault(record, set()).add(tuple(row))
    assert sorted(held) == list(range(len(header)))
    found, ending = {}, b""
    # all rows of a record are alike
    for i, (dtype, offset, shape, stride) in ((i, *held[i]) for i in range(len(header))):
        at = 80 + len(ending)
        elements = nbytes[i] // ITEMSIZE[dtype]
        leading, entries = b"", []
        stream = b"\x80\x02" + array_pickle(dtype, elements, offset, shape, stride) + b"."
        for name, content in ((b"data.pkl", stream), (b"byteorder", b"little"), (b"version", b"3\n")):
            entries.append((b"archive/" + name, 0, zlib.crc32(content), len(content), len(leading)))
            leading += local_header(b"archive/" + name, 0, zlib.crc32(content), len(content)) + content
        room = begin[i] - header[i] - at - len(leading)
        inner = local_header(b"archive/data/0", 8, 0, nbytes[i], bytes(room - 30 - 14 - 24))
        own = 30 + len(f"archive/data/{i}") + 24
        found[i] = bytes(80 - own) + ending + leading + inner
        archive = header[i] + at
        # where the archive's central directory begins, counted from the archive
        end = begin[i] + nbytes[i] + 24 + 80 - archive
        parts = [central_header(b"archive/data/0", 8, crcs[i], nbytes[i], len(leading))]
        directory = b"".join(parts + [central_header(*entry) for entry in entries])
        after, unknown = end + len(directory), 2**32 - 1
        ending = (
            directory
            + struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, 4, 4, len(directory), end)
            + struct.pack("<4sIQI", b"PK\6\7", 0, after, 1)
            + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, unknown, unknown, 0)
        )
        alone = data[archive : archive + after + 98]
        assert alone.endswith(ending)
        with zipfile.ZipFile(io.BytesIO(alone)) as opened:
            assert opened.testzip() is None
            assert opened.read("archive/data/0") == data[begin[i] : begin[i] + nbytes[i]]
        tensor = torch.load(io.BytesIO(alone), weights_only=True)
        assert (tuple(tensor.shape), tensor.stride()) == (shape, stride)
        assert tensor.untyped_storage().nbytes() == nbytes[i]
    return {**found, len(header): ending}


def read_arrays(data: bytes) -> dict[tuple[str, str], tuple[int, int, tuple[int, ...], list[bytes]]]:
    """Kind, element type, shape and elements of every array by provider name and key."""
    index, _, _ = read_index(data)
    records = read_records(data, index)
    shards = index["shards"]
    text = [s.decode("utf-8", "surrogatepass") for s in cut(index["keys"], numbers(index["key_nbytes"], 4))]
    names = [p.decode("utf-8", "surrogatepass") for p in index["providers"]]
    ndim = numbers(shards["ndim"], 1)
    columns = [
        numbers(shards[n], w) for n, w in (("provider", 4), ("kind", 1), ("dtype", 1), ("record", 4), ("offset", 8))
    ]
    shapes, strides = (cut(numbers(shards[n], 8), ndim) for n in ("dims", "strides"))
    found = {}
    for key, provider, kind, dtype, record, offset, shape, stride in zip(text, *columns, shapes, strides, strict=True):
        size = ITEMSIZE[dtype]
        places = [offset + size * sum(map(int.__mul__, at, stride)) for at in product(*map(range, shape))]
        assert all(p + size <= len(records[record]) for p in places)
        found[names[provider], key] = kind, dtype, shape, [records[record][p : p + size] for p in places]
    assert len(found) == len(text)
    return found


def read_digests(data: bytes) -> dict[tuple[str, str], int | None]:
    """For each array its contribution to the digest of its logical tensor, compared with the definition."""
    index, _, _ = read_index(data)
    shards = index["shards"]
    arrays = read_arrays(data)
    part, digest, digested = (numbers(shards[n], w) for n, w in (("part", 1), ("digest", 4), ("digested", 1)))
    wholes = cut(numbers(shards["global_dims"], 8), numbers(shards["global_ndim"], 1))
    places = cut(numbers(shards["place"], 8), [(0, len(g), 2)[p] for p, g in zip(part, wholes, strict=True)])
    found: dict[tuple[str, str], int | None] = {}
    for i, (key, (_, dtype, shape, elements)) in enumerate(arrays.items()):
        assert digested[i] == 1 or (digested[i], digest[i]) == (0, 0)
        found[key] = digest[i] if digested[i] else None
        if not digested[i]:
            continue
        # the logical tensor with nothing but this part in it
        whole, size = wholes[i] if part[i] else shape, ITEMSIZE[dtype]
        tensor = bytearray(size * math.prod(whole))
        for number, at in enumerate(product(*map(range, shape))):
            where = places[i][0] + number if part[i] == 2 else position(at, places[i] or (0,) * len(shape), whole)
            tensor[where * size : (where + 1) * size] = elements[number]
        assert digest[i] == zlib.crc32(tensor) ^ zlib.crc32(bytes(len(tensor)))
    return found


def position(at: tuple[int, ...], origin: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Where an element of a part is in the flattened logical tensor."""
    found = 0
    for n, begin, length in zip(at, origin, shape, strict=True):
        found = found * length + begin + n
    return found


def read_catalog(data: bytes, entry: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The columns of a catalog; every checksum is compared."""
    magic, ranks, tensors, rows, block = struct.unpack("<24s4Q", data[:56])
    assert magic == b"datastates/catalog 01\n\0\0"
    assert block == 4096
    tables = (
        ("<QI", ranks, ("nbytes", "index_crc")),
        ("<QQIB", tensors, ("key", "first", "digest", "digested")),
        ("<QQI", rows, ("begin", "reach", "rank")),
    )
    nbytes = sum(struct.calcsize(record) * n for record, n, _ in tables)
    head = 56 + 4 * -(-nbytes // block)
    assert len(data) == head + nbytes == entry["nbytes"]
    assert zlib.crc32(data[:head]) == entry["head_crc32"]
    body = data[head:]
    assert list(numbers(data[56:head], 4)) == [zlib.crc32(body[a : a + block]) for a in range(0, nbytes, block)]
    columns: dict[str, tuple[int, ...]] = {}
    pieces = cut(body, [struct.calcsize(record) * n for record, n, _ in tables])
    for (record, _, names), piece in zip(tables, pieces, strict=True):
        columns |= dict(zip(names, zip(*struct.iter_unpack(record, piece), strict=True), strict=True))
    assert list(columns["key"]) == sorted(set(columns["key"]))
    assert columns["first"][0] == 0
    columns["first"] += (rows,)  # where the last tensor's rows end
    return columns


def key_number(kind: bytes, full: str) -> int:
    return int.from_bytes(hashlib.blake2b(kind + full.encode(), digest_size=8).digest(), "little")


def values(dtype: int, elements: list[bytes]) -> list[Any]:
    return [struct.unpack(CODES[dtype], e)[0] for e in elements]
