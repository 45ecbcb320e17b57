"""An index that lies: each field is altered, and all checksums match, so that only the checks of meaning are left."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from datastates.container.table import KINDS
from datastates.state import dtypes

Fields = dict[str, Any]
Edit = Callable[[Fields], object]
Resigned = Callable[[Edit | bytes], Path]

WIDTH = {"header_offset": 8, "data_offset": 8, "record_nbytes": 8, "record_crc": 4, "chunk_crc": 4, "key_nbytes": 4}
WIDTH |= {"provider": 4, "kind": 1, "dtype": 1, "record": 4, "offset": 8, "part": 1, "ndim": 1, "dims": 8, "strides": 8}
WIDTH |= {"global_ndim": 1, "global_dims": 8, "place": 8, "digest": 4, "digested": 1}
COLUMNS = ("provider", "kind", "dtype", "record", "offset", "part", "ndim", "dims", "strides")
COLUMNS += ("global_ndim", "global_dims", "place", "digest", "digested")
FIELDS = ("format", "identity", "chunk", "header_offset", "data_offset", "record_nbytes", "record_crc", "chunk_crc")
FIELDS += ("providers", "key_nbytes", "keys", "shards", "objects", "pickle")
LAST = 2**64 - 1


def home(fields: Fields, column: str) -> Fields:
    return fields["shards"] if column in fields["shards"] else fields


def read(fields: Fields, column: str) -> list[int]:
    data, width = home(fields, column)[column], WIDTH[column]
    return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def write(fields: Fields, column: str, values: list[int]) -> None:
    home(fields, column)[column] = b"".join(v.to_bytes(WIDTH[column], "little") for v in values)


def put(column: str, at: int, value: int | Callable[[list[int]], int]) -> Edit:
    """Set one number of a column."""

    def edit(fields: Fields) -> None:
        values = read(fields, column)
        values[at] = value(values) if callable(value) else value
        write(fields, column, values)

    return edit


def row(key: str) -> Callable[[Fields], int]:
    """Finds the number of the row with a key."""

    def find(fields: Fields) -> int:
        at, number = 0, 0
        for number, n in enumerate(read(fields, "key_nbytes")):
            if fields["keys"][at : at + n] == key.encode():
                return number
            at += n
        raise AssertionError(key)

    return find


def of_row(key: str, **columns: Any) -> Edit:
    """Set columns of one row. A tuple replaces the row's part of ``dims`` or a similar column, and must be as long."""

    def edit(fields: Fields) -> None:
        number = row(key)(fields)
        ndim, global_ndim, part = (read(fields, c) for c in ("ndim", "global_ndim", "part"))
        lengths = {"dims": ndim, "strides": ndim, "global_dims": global_ndim}
        lengths["place"] = [2 if p == 2 else g if p == 1 else 0 for p, g in zip(part, global_ndim, strict=True)]
        for column, value in columns.items():
            values = read(fields, column)
            if isinstance(value, tuple):
                start = sum(lengths[column][:number])
                assert len(value) == lengths[column][number]
                values[start : start + len(value)] = value
            else:
                values[number] = value
            write(fields, column, values)

    return edit


def cut(column: str) -> Edit:
    return lambda fields: home(fields, column).update({column: home(fields, column)[column][: -WIDTH[column]]})


def lengthen(column: str, by: int) -> Edit:
    return lambda fields: home(fields, column).update({column: home(fields, column)[column] + bytes(by)})


def into_header(fields: Fields) -> None:
    """The first record's data begins within its own header; all else fits."""
    begin, nbytes = read(fields, "data_offset"), read(fields, "record_nbytes")
    nbytes[0] += begin[0] - 40
    begin[0] = 40
    write(fields, "data_offset", begin)
    write(fields, "record_nbytes", nbytes)


def forget_records(fields: Fields) -> None:
    """The index forgets all records but the first, which grows by a byte."""
    for column in ("header_offset", "data_offset", "record_nbytes", "record_crc"):
        write(fields, column, read(fields, column)[:1])
    write(fields, "chunk_crc", read(fields, "chunk_crc")[:1])
    write(fields, "record_nbytes", [read(fields, "record_nbytes")[0] + 1])


def second_object(fields: Fields) -> None:
    fields["objects"].append(list(fields["objects"][0]))


def same_keys(fields: Fields) -> None:
    """Rows "weight" and "flags" of one provider both become "weight"."""
    lengths = read(fields, "key_nbytes")
    number = row("flags")(fields)
    at = sum(lengths[:number])
    fields["keys"] = fields["keys"][:at] + b"weight" + fields["keys"][at + 5 :]
    lengths[number] = 6
    write(fields, "key_nbytes", lengths)


def key_bytes(data: bytes) -> Edit:
    """Overwrite the first bytes of the keys."""
    return lambda fields: fields.update(keys=data + fields["keys"][len(data) :])


def set_object(position: int, value: Any) -> Edit:
    return lambda fields: fields["objects"][0].__setitem__(position, value)


def hashes(edit: Callable[[list[Any]], object]) -> Edit:
    """Adds hashes that fit, and changes them."""

    def apply(fields: Fields) -> None:
        fields["hashes"] = ["x", bytes(4 * len(fields["chunk_crc"])), bytes(4 * len(fields["key_nbytes"]))]
        edit(fields["hashes"])

    return apply


LIES: dict[str, Edit] = {
    # records
    "data beyond the file": put("data_offset", 3, 1 << 40),
    "data at 2**64-1": put("data_offset", 3, LAST),
    "data at 2**63": put("data_offset", 3, 1 << 63),
    "header at 2**64-1": put("header_offset", 3, LAST),
    "header beyond the file": put("header_offset", 3, 1 << 40),
    "first header not at 0": put("header_offset", 0, 64),
    "record of 2**64-1 bytes": put("record_nbytes", 3, LAST),
    "record of 2**63 bytes": put("record_nbytes", 3, 1 << 63),
    "last record beyond the file": put("record_nbytes", -1, 1 << 20),
    "length that wraps around": put("record_nbytes", -1, lambda v: LAST - 100),
    "overlapping records": put("data_offset", 2, lambda v: v[1]),
    "overlapping headers": put("header_offset", 2, lambda v: v[1]),
    "gap between records": put("header_offset", 2, lambda v: v[2] + 1),
    "record longer by one": put("record_nbytes", 2, lambda v: v[2] + 1),
    "data inside its header": into_header,
    "records cut off": forget_records,
    "records swapped": lambda f: write(f, "data_offset", read(f, "data_offset")[::-1]),
    "a chunk too few": cut("chunk_crc"),
    "a chunk too many": lengthen("chunk_crc", 4),
    # rows
    "provider out of range": put("provider", 0, 3),
    "provider 2**32-1": put("provider", 0, 2**32 - 1),
    "unknown library": put("kind", 0, len(KINDS)),
    "library 255": put("kind", 0, 255),
    "unknown element type": put("dtype", 0, len(dtypes.ALL)),
    "element type 255": put("dtype", 0, 255),
    "record out of range": put("record", 0, 36),
    "record 2**32-1": put("record", 0, 2**32 - 1),
    "unknown part": put("part", 0, 3),
    "offset beyond its record": put("offset", 0, 4096),
    "offset 2**64-4": put("offset", 0, LAST - 3),
    "offset 2**63": put("offset", 0, 1 << 63),
    "unaligned offset": of_row("tail", offset=2, dims=(1, 1)),
    "one element too many": of_row("tail", dims=(2, 3)),
    "dimension -1": of_row("weight", dims=(LAST, 4)),
    "dimension 2**63": of_row("weight", dims=(3, 1 << 63)),
    "stride -1": of_row("weight", strides=(LAST, 1)),
    "stride 2**63": of_row("weight", strides=(1 << 63, 1)),
    "span that wraps around": of_row("weight", dims=(2**32 + 1, 1), strides=(2**32, 1)),
    "bytes that wrap around": of_row("weight", dims=(2**62 + 1, 1), strides=(1, 1)),
    "one dimension too many": put("ndim", 0, 3),
    "one dimension too few": put("ndim", 0, 1),
    "255 dimensions": put("ndim", 0, 255),
    "dimensions moved between rows": lambda f: (put("ndim", 0, 1)(f), put("ndim", 5, 1)(f)),
    "global shape of a whole": put("global_ndim", 0, 1),
    "global shape of a whole, supplied": lambda f: (put("global_ndim", 0, 1)(f), lengthen("global_dims", 8)(f)),
    "box without its global shape": lambda f: put("global_ndim", row("box")(f), 0)(f),
    "box beyond its global shape": of_row("box", place=(3, 4)),
    "box at 2**64-1": of_row("box", place=(LAST, 0)),
    "box larger than its global shape": of_row("box", global_dims=(1, 6)),
    "box of another number of dimensions": lambda f: (
        of_row("box", global_ndim=3)(f),
        lengthen("global_dims", 8)(f),
        lengthen("place", 8)(f),
    ),
    "flat range that ends before it begins": of_row("flat", place=(14, 9)),
    "flat range beyond its tensor": of_row("flat", place=(17, 22)),
    "flat range at 2**64-1": of_row("flat", place=(LAST - 5, LAST)),
    "flat range of another length": of_row("flat", place=(9, 15)),
    "flat range of a tensor that wraps around": of_row("flat", global_dims=(2**33, 2**33)),
    "flat range of a tensor of 2**62 bytes": of_row("flat", global_dims=(2**31, 2**30)),
    "box of a tensor of 2**62 bytes": of_row("box", global_dims=(2**30, 2**30)),
    "digest that is known twice": put("digested", 0, 2),
    "digest that is known 255 times": put("digested", 0, 255),
    "digest that is not known": put("digested", 0, 0),
    "type that torch lacks, of torch": put("dtype", 0, dtypes.BY_NAME["int4"].code),
    # keys
    "the same key twice": same_keys,
    "keys shorter than their lengths": lambda f: f.update(keys=f["keys"][:-1]),
    "keys longer than their lengths": lambda f: f.update(keys=f["keys"] + b"x"),
    "key of 2**32-1 bytes": put("key_nbytes", 0, 2**32 - 1),
    "key of invalid UTF-8": key_bytes(b"\xff"),
    "key of overlong UTF-8": key_bytes(b"\xc0\xaf"),
    "provider of invalid UTF-8": lambda f: f["providers"].__setitem__(0, b"\xff\xfe"),
    "the same provider twice": lambda f: f["providers"].__setitem__(1, f["providers"][0]),
    # objects and data.pkl
    "object before data.pkl": set_object(2, 0),
    "object beyond data.pkl": set_object(3, 1 << 20),
    "object at 2**64-1": set_object(2, LAST),
    "object of 2**63 bytes": set_object(3, 1 << 63),
    "object at -1": set_object(2, -1),
    "object of -1 bytes": set_object(3, -1),
    "object of a provider out of range": set_object(0, 3),
    "object of provider -1": set_object(0, -1),
    "object with a checksum of -1": set_object(4, -1),
    "object with a checksum of 2**32": set_object(4, 1 << 32),
    "object with a text as key": set_object(1, "text"),
    "object with a number as key": set_object(1, 1),
    "object with a key of invalid UTF-8": set_object(1, b"\xff"),
    "object at 1.0": set_object(2, 1.0),
    "object at true": set_object(0, False),
    "object with a field too many": lambda f: f["objects"][0].append(0),
    "object with a field too few": lambda f: f["objects"][0].pop(),
    "the same object twice": second_object,
    "data.pkl at 0": lambda f: f["pickle"].__setitem__(0, 0),
    "data.pkl elsewhere": lambda f: f["pickle"].__setitem__(0, f["pickle"][0] + 64),
    "data.pkl of 2**64-1 bytes": lambda f: f["pickle"].__setitem__(1, LAST),
    "data.pkl of -1 bytes": lambda f: f["pickle"].__setitem__(1, -1),
    "data.pkl beyond the file": lambda f: f["pickle"].__setitem__(1, 1 << 20),
    "data.pkl at a text": lambda f: f["pickle"].__setitem__(0, "0"),
    "data.pkl with four numbers": lambda f: f["pickle"].append(0),
    # hashes, which it may lack
    "hashes of null": lambda f: f.update(hashes=None),
    "hashes without the arrays'": hashes(lambda found: found.pop()),
    "hashes without a name": hashes(lambda found: found.__setitem__(0, "")),
    "hashes with a number as name": hashes(lambda found: found.__setitem__(0, 5)),
    "hashes with a long name": hashes(lambda found: found.__setitem__(0, "x" * 65)),
    "hashes of chunks too short": hashes(lambda found: found.__setitem__(1, found[1][:-1])),
    "hashes of arrays too long": hashes(lambda found: found.__setitem__(2, found[2] + bytes(16))),
    "hashes of arrays as text": hashes(lambda found: found.__setitem__(2, "x" * len(found[2]))),
    # the head
    "format 0": lambda f: f.update(format=0),
    "format 2": lambda f: f.update(format=2),
    "format 1.0": lambda f: f.update(format=1.0),
    "format true": lambda f: f.update(format=True),
    "chunk 0": lambda f: f.update(chunk=0),
    "chunk 1": lambda f: f.update(chunk=1),
    "chunk -1": lambda f: f.update(chunk=-1),
    "identity without an attempt": lambda f: f["identity"].pop("attempt"),
    "identity with more": lambda f: f["identity"].update(more=1),
    "identity with a text as step": lambda f: f["identity"].update(step="120"),
    "identity with true as rank": lambda f: f["identity"].update(rank=False),
    "another step than the manifest's": lambda f: f["identity"].update(step=121),
    "another rank than the manifest's": lambda f: f["identity"].update(rank=1),
    "another world size than the manifest's": lambda f: f["identity"].update(world_size=2),
    "another attempt than the manifest's": lambda f: f["identity"].update(attempt="00000000"),
}

WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "-1": -1,
    "2**64-1": LAST,
    "1.5": 1.5,
    "text": "text",
    "odd bytes": b"\x01\x02\x03",
    "nested lists": [[[]]],
    "map": {"a": 1},
    "map of numbers": {b"a": 1},
    "extension": msgpack.ExtType(5, b"12345678"),
    "timestamp": msgpack.Timestamp(1, 2),
}


@pytest.mark.parametrize("lie", LIES)
def test_lie_in_the_index_is_refused(resigned: Resigned, refused: Any, lie: str) -> None:
    refused("open_checkpoint", resigned(LIES[lie]))


def test_untouched_index_is_accepted(resigned: Resigned, attack: Any) -> None:
    assert attack("open_checkpoint", resigned(lambda fields: None)).error is None


def test_hashes_that_fit_are_accepted(resigned: Resigned, attack: Any) -> None:
    assert attack("open_checkpoint", resigned(hashes(lambda found: None))).error is None


@pytest.mark.parametrize("key", ["weight", "tail", "flags", "empty", "columns", "flat"])
def test_digest_that_lies_is_found_by_verification(resigned: Resigned, attack: Any, key: str) -> None:
    def edit(fields: Fields) -> None:
        number = row(key)(fields)
        put("digest", number, read(fields, "digest")[number] ^ 1)(fields)

    outcome = attack("verify", resigned(edit))
    assert f"{key} " in outcome.message
    assert "its digest contradicts its data" in outcome.message


@pytest.mark.parametrize("key", ["transposed", "repeated", "box"])
def test_digest_where_there_can_be_none_is_found_by_verification(resigned: Resigned, attack: Any, key: str) -> None:
    outcome = attack("verify", resigned(of_row(key, digest=1, digested=1)))
    assert f"{key} has a digest, which its places do not allow" in outcome.message


def test_digest_may_be_left_out(resigned: Resigned, attack: Any) -> None:
    # with the new index the file lacks its zip directory; verification does not complain about digests
    assert attack("verify", resigned(of_row("weight", digest=0, digested=0))).message.startswith("file framing")


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", FIELDS)
def test_field_of_a_wrong_type_is_refused(resigned: Resigned, refused: Any, name: str, wrong: str) -> None:
    refused("open_checkpoint", resigned(lambda fields: fields.update({name: WRONG[wrong]})))


@pytest.mark.parametrize("wrong", [w for w in WRONG if w != "odd bytes"])
@pytest.mark.parametrize("name", COLUMNS)
def test_column_of_a_wrong_type_is_refused(resigned: Resigned, refused: Any, name: str, wrong: str) -> None:
    refused("open_checkpoint", resigned(lambda fields: fields["shards"].update({name: WRONG[wrong]})))


@pytest.mark.parametrize("name", ["objects", "providers", "keys", "key_nbytes"])
@pytest.mark.parametrize("empty", ["", b"", {}], ids=["text", "bytes", "map"])
def test_empty_field_of_a_wrong_type_is_refused(resigned: Resigned, refused: Any, name: str, empty: object) -> None:
    refused("open_checkpoint", resigned(lambda fields: fields.update({name: empty})))


@pytest.mark.parametrize("name", FIELDS)
def test_missing_field_is_refused(resigned: Resigned, refused: Any, name: str) -> None:
    refused("open_checkpoint", resigned(lambda fields: fields.pop(name)))


@pytest.mark.parametrize("name", COLUMNS)
def test_missing_column_is_refused(resigned: Resigned, refused: Any, name: str) -> None:
    refused("open_checkpoint", resigned(lambda fields: fields["shards"].pop(name)))


@pytest.mark.parametrize("name", [n for n in WIDTH if n not in ("dims", "strides", "global_dims", "place")])
@pytest.mark.parametrize("how", ["shorter", "longer", "a byte longer"])
def test_column_of_another_length_is_refused(resigned: Resigned, refused: Any, name: str, how: str) -> None:
    edit = (
        cut(name)
        if how == "shorter"
        else lengthen(name, 1 if how == "a byte longer" and WIDTH[name] > 1 else WIDTH[name])
    )
    refused("open_checkpoint", resigned(edit))


@pytest.mark.parametrize("name", ["dims", "strides", "global_dims", "place"])
@pytest.mark.parametrize("how", ["shorter", "longer", "a byte longer"])
def test_shapes_of_another_length_are_refused(resigned: Resigned, refused: Any, name: str, how: str) -> None:
    refused("open_checkpoint", resigned(cut(name) if how == "shorter" else lengthen(name, 1 if "byte" in how else 8)))


BOMBS = {
    "nothing": b"",
    "a number": b"\x01",
    "a list": b"\x90",
    "deep lists": b"\x91" * 200_000,
    "deep maps": b"\x81\xa1a" * 200_000,
    "a list of 2**32-1": b"\xdd\xff\xff\xff\xff",
    "a map of 2**32-1": b"\xdf\xff\xff\xff\xff",
    "bytes of 2**32-1": b"\xc6\xff\xff\xff\xff",
    "a text of 2**32-1": b"\xdb\xff\xff\xff\xff",
    "an extension of 2**32-1": b"\xc9\xff\xff\xff\xff\x05",
    "long lists in each other": (b"\xdd" + struct.pack(">I", 200_000)) * 500 + b"\x90" * 200_000,
    "many lists": b"\xdd" + struct.pack(">I", 200_000) + b"\x90" * 200_000,
    "bytes behind the map": b"\x80\x01",
    "a broken code": b"\xc1",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_msgpack_bomb_is_refused(resigned: Resigned, refused: Any, bomb: str) -> None:
    refused("open_checkpoint", resigned(BOMBS[bomb]))


def test_bomb_inside_a_field_is_refused(resigned: Resigned, refused: Any, genuine: bytes) -> None:
    claim = (b"\xdd" + struct.pack(">I", 200_000)) * 500 + b"\x90" * 200_000
    refused("open_checkpoint", resigned(b"\x81\xa6format" + claim))


def test_long_key_in_the_index_is_refused(resigned: Resigned, refused: Any) -> None:
    refused("open_checkpoint", resigned(lambda fields: fields.update({"x" * (1 << 20): 1})))


FOOTERS = {
    "upper case": lambda f: f.upper(),
    "another format": lambda f: f.replace(b"/01", b"/02"),
    "format -1": lambda f: f.replace(b"/01", b"/-1"),
    "index at 2**64-1": lambda f: f[:20] + b"f" * 16 + f[36:],
    "index of 2**64-1 bytes": lambda f: f[:37] + b"f" * 16 + f[53:],
    "index in the ending": lambda f: f[:37] + b"%016x" % (int(f[37:53], 16) + 1) + f[53:],
    "spaces for zeros": lambda f: f[:20] + f[20:36].replace(b"0", b" ") + f[36:],
    "underscores": lambda f: f[:20] + b"0_" + f[22:],
    "other digits": lambda f: f[:20] + "٣".encode() * 8 + f[36:],
    "another checksum": lambda f: f[:58] + b"00000000",
}


@pytest.mark.parametrize("name", FOOTERS)
def test_broken_footer_is_refused(genuine: bytes, tmp_path: Path, refused: Any, name: str) -> None:
    path = tmp_path / "container.pt"
    path.write_bytes(genuine[:-66] + FOOTERS[name](genuine[-66:]))
    refused("open", path)


@pytest.mark.parametrize("data", [b"", b"PK", bytes(66), bytes(10_000), b"datastates/01 index="])
def test_foreign_file_is_refused(tmp_path: Path, refused: Any, data: bytes) -> None:
    path = tmp_path / "container.pt"
    path.write_bytes(data)
    refused("open", path)
