"""A manifest that lies, with a right checksum; and a manifest with a flipped bit, at every position."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.commit import manifest
from datastates.errors import FormatError
from datastates.reading.every_container import open_checkpoint

ENTRY = {"file": "rank-00000.pt", "rank": 0, "nbytes": 100, "index_crc32": 7}
FIELDS: dict[str, Any] = {
    "format": 1,
    "step": 120,
    "attempt": "9f86d081",
    "created": "2026-01-31T12:00:00+00:00",
    "world_size": 1,
    "containers": [ENTRY],
}


def signed(fields: Any) -> bytes:
    crc = zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return (json.dumps({**fields, "crc32": crc}, indent=2) + "\n").encode()


def with_entry(**entry: Any) -> bytes:
    return signed({**FIELDS, "containers": [{**ENTRY, **entry}]})


def without(name: str) -> bytes:
    return signed({k: v for k, v in FIELDS.items() if k != name})


def brief(value: object) -> str:
    return f"{value!r:.12}"


GOOD = signed(FIELDS)
FILES = [
    "",
    ".",
    "..",
    "../rank-00000.pt",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "a\0b",
    "\0",
    "a\n",
    "a b",
    ".hidden",
    "-rf",
    "~",
    "~root",
]
FILES += ["x" * 256, "käse", "C:", "a/../../b", "rank-00000.pt/", "./rank-00000.pt", "$HOME"]
NUMBERS = [-1, 10**30, 10**4299, 1.0, 1.5, True, "1", None, [], {}, [1], -(10**30), float("inf"), float("nan")]


def numbered(sequence: Any) -> bytes:
    fields = dict(FIELDS)
    return signed(
        {"format": 2, "step": fields.pop("step"), "sequence": sequence}
        | {k: fields[k] for k in fields if k != "format"}
    )


@pytest.mark.parametrize("data", [GOOD, numbered(1), numbered(2**63 - 1)], ids=["format 1", "format 2", "the highest"])
def test_well_signed_manifest_is_accepted(attack: Any, data: bytes) -> None:
    assert attack("manifest", data=data).error is None


@pytest.mark.parametrize("value", [0, 2**63, *NUMBERS], ids=brief)
def test_impossible_sequence_is_refused(refused: Any, value: Any) -> None:
    refused("manifest", data=numbered(value))


def test_a_sequence_in_a_manifest_of_format_1_is_refused(refused: Any) -> None:
    refused("manifest", data=numbered(1).replace(b'"format": 2', b'"format": 1'))
    refused("manifest", data=signed({**FIELDS, "sequence": 1}))


CATALOG = {"file": "catalog.bin", "nbytes": 100, "head_crc32": 7}
KEPT = {**ENTRY, "file": "rank-00000.kept.pt", "step": 60, "attempt": "0a1b2c3d"}
FOLDER = "kept-00000060.0a1b2c3d"


def with_kept(*kept: dict[str, Any], number: int = 3) -> bytes:
    fields = json.loads(numbered(1))
    del fields["crc32"]
    return signed({**fields, "format": number, "containers": [ENTRY, *kept], "catalog": CATALOG})


def in_a_store(kept: dict[str, Any], own: dict[str, Any] | None = None) -> bytes:
    fields = json.loads(with_kept(kept))
    del fields["crc32"]
    attempt = fields["attempt"]
    fields["containers"][0] |= {"file": f"rank-00000.{attempt}.pt", **(own or {})}
    return signed({**fields, "catalog": {**CATALOG, "file": f"catalog.{attempt}.bin"}})


def test_a_kept_container_is_accepted(attack: Any) -> None:
    assert attack("manifest", data=with_kept(KEPT)).error is None
    assert attack("manifest", data=in_a_store({**KEPT, "folder": FOLDER})).error is None


@pytest.mark.parametrize(
    "data",
    [
        with_kept(KEPT, number=2),
        with_kept(),
        with_kept(KEPT, KEPT),
        with_kept({**KEPT, "rank": 1, "file": "rank-00001.kept.pt"}),
        with_kept({**KEPT, "rank": 1}),
        with_kept({**KEPT, "file": "rank-00000.pt"}),
        with_kept({**KEPT, "file": "rank-00000.kept.0a1b2c3d.pt"}),
        with_kept({**KEPT, "file": "kept.pt"}),
        with_kept({name: value for name, value in KEPT.items() if name != "step"}),
        with_kept({name: value for name, value in KEPT.items() if name != "attempt"}),
        with_kept({**KEPT, "attempt": "../other"}),
        with_kept({**KEPT, "step": 10**18}),
        with_kept({**KEPT, "folder": FOLDER}),
        in_a_store(KEPT),
        in_a_store({**KEPT, "folder": "."}),
        in_a_store({**KEPT, "folder": f"../{FOLDER}"}),
        in_a_store({**KEPT, "folder": f"{FOLDER}/.."}),
        in_a_store({**KEPT, "folder": f"{FOLDER}\n"}),
        in_a_store({**KEPT, "folder": FOLDER}, own={"folder": FOLDER}),
        in_a_store({**KEPT, "folder": FOLDER}, own={"step": 60, "attempt": "0a1b2c3d"}),
        with_entry(folder=FOLDER),
        with_entry(step=60, attempt="0a1b2c3d"),
        signed({**FIELDS, "containers": [ENTRY, KEPT], "catalog": CATALOG}),
    ],
    ids=[
        *["format 2", "none", "twice", "of no rank", "of another rank", "its name", "an attempt", "a name"],
        *["no step", "no attempt", "no attempt's name", "a long step", "a folder", "no folder", "this folder"],
        *[
            "a folder above",
            "a folder above by another",
            "a line",
            "another's folder",
            "another's step",
            "a folder alone",
        ],
        *["a step alone", "format 1"],
    ],
)
def test_a_kept_container_that_does_not_belong_there_is_refused(refused: Any, data: bytes) -> None:
    refused("manifest", data=data)


def measured(metric: Any) -> bytes:
    fields = json.loads(numbered(1))
    del fields["crc32"]
    after = ("world_size", "containers")
    return signed({k: fields[k] for k in fields if k not in after} | {"metric": metric} | {k: fields[k] for k in after})


@given(metric=st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_metric_is_as_it_was(metric: float) -> None:
    data = measured(metric)
    decoded = manifest.decode(data, "manifest.json")
    assert struct.pack("d", decoded.metric) == struct.pack("d", metric)
    assert manifest.encode(decoded) == data


@pytest.mark.parametrize("value", [v for v in NUMBERS if type(v) is not float or v - v], ids=brief)
def test_what_is_no_metric_is_refused(refused: Any, value: Any) -> None:
    refused("manifest", data=measured(value))
    refused("manifest", data=measured(1.5).replace(b"1.5", b"15e-1"))


@pytest.mark.parametrize("file", FILES)
def test_file_name_that_is_no_name_is_refused(refused: Any, file: str) -> None:
    assert "file" in refused("manifest", data=with_entry(file=file)).message


@pytest.mark.parametrize("value", [None, 1, [], {}, ["rank-00000.pt"]])
def test_file_of_a_wrong_type_is_refused(refused: Any, value: object) -> None:
    refused("manifest", data=with_entry(file=value))


@pytest.mark.parametrize("value", NUMBERS, ids=brief)
@pytest.mark.parametrize("name", ["rank", "nbytes", "index_crc32"])
def test_impossible_number_of_a_container_is_refused(refused: Any, tmp_path: Path, name: str, value: Any) -> None:
    if name == "nbytes" and type(value) is int and value > 0:
        # any positive length is possible, but the file has another one
        (tmp_path / "manifest.json").write_bytes(with_entry(nbytes=value))
        (tmp_path / "rank-00000.pt").write_bytes(b"x" * 100)
        refused("open_checkpoint", tmp_path)
        return
    refused("manifest", data=with_entry(**{name: value}))


@pytest.mark.parametrize("value", [v for v in NUMBERS if not (type(v) is int and v > 0)], ids=brief)
def test_impossible_step_is_refused(refused: Any, value: Any) -> None:
    refused("manifest", data=signed({**FIELDS, "step": value}))


@pytest.mark.parametrize("value", [0, 2, *NUMBERS], ids=brief)
@pytest.mark.parametrize("name", ["format", "world_size"])
def test_impossible_number_is_refused(refused: Any, name: str, value: Any) -> None:
    refused("manifest", data=signed({**FIELDS, name: value}))


@pytest.mark.parametrize("value", [None, 1, [], {}, "x" * 65])
@pytest.mark.parametrize("name", ["attempt", "created"])
def test_impossible_text_is_refused(refused: Any, name: str, value: Any) -> None:
    refused("manifest", data=signed({**FIELDS, name: value}))


CONTAINERS: dict[str, Any] = {
    "none": [],
    "null": None,
    "a map": {},
    "a text": "rank-00000.pt",
    "numbers": [1],
    "a rank too many": [ENTRY, {**ENTRY, "rank": 1, "file": "rank-00001.pt"}],
    "the same rank twice": [ENTRY, {**ENTRY, "file": "rank-00001.pt"}],
    "only another rank": [{**ENTRY, "rank": 1}],
    "more fields": [{**ENTRY, "more": 1}],
    "fewer fields": [{"file": "rank-00000.pt", "rank": 0, "nbytes": 100}],
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_impossible_containers_are_refused(refused: Any, name: str) -> None:
    refused("manifest", data=signed({**FIELDS, "containers": CONTAINERS[name]}))


def test_same_file_for_two_ranks_is_refused(refused: Any) -> None:
    refused("manifest", data=signed({**FIELDS, "world_size": 2, "containers": [ENTRY, {**ENTRY, "rank": 1}]}))


def test_missing_ranks_are_refused(refused: Any) -> None:
    refused("manifest", data=signed({**FIELDS, "world_size": 2}))


@pytest.mark.parametrize("name", FIELDS)
def test_missing_field_is_refused(refused: Any, name: str) -> None:
    refused("manifest", data=without(name))


def test_unknown_field_is_refused(refused: Any) -> None:
    refused("manifest", data=signed({**FIELDS, "more": 1}))


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a number": b"1",
    "a text": b'"manifest"',
    "a list": b"[]",
    "a list of a manifest": b"[" + GOOD + b"]",
    "an empty map": b"{}",
    "only a checksum": b'{"crc32": 0}',
    "no checksum": (json.dumps(FIELDS, indent=2) + "\n").encode(),
    "a checksum as text": GOOD.replace(b'"crc32": ', b'"crc32": "').replace(b"\n}\n", b'"\n}\n'),
    "deep lists": b"[" * 200_000,
    "deep lists that end": b"[" * 100_000 + b"]" * 100_000,
    "deep maps": b'{"a":' * 200_000,
    "deep lists as format": b'{"crc32": 0, "format": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a number of a million digits": b'{"crc32": 0, "step": ' + b"9" * 1_000_000 + b"}",
    "a number beyond floats": GOOD.replace(b'"step": 120', b'"step": 1e999'),
    "an exponent of a million": GOOD.replace(b'"step": 120', b'"step": 12e1'),
    "a step twice": GOOD.replace(b'"step": 120', b'"step": 7,\n  "step": 120'),
    "a file twice": GOOD.replace(b'"file":', b'"file": "../x",\n      "file":'),
    "a checksum twice": GOOD.replace(b'"crc32"', b'"crc32": 0,\n  "crc32"'),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "UTF-16": GOOD.decode().encode("utf-16"),
    "invalid UTF-8": GOOD.replace(b"9f86", b"\xff\xfe86"),
    "a NUL behind it": GOOD + b"\0",
    "text behind it": GOOD + b"{}",
    "no line feed at the end": GOOD[:-1],
    "carriage returns": GOOD.replace(b"\n", b"\r\n"),
    "tabs": GOOD.replace(b"  ", b"\t"),
    "compact": json.dumps(json.loads(GOOD), separators=(",", ":")).encode(),
    "another order": (json.dumps(dict(reversed(json.loads(GOOD).items())), indent=2) + "\n").encode(),
    "an escape for a letter": GOOD.replace(b"rank-00000.pt", b"\\u0072ank-00000.pt"),
    "a lone surrogate": signed({**FIELDS, "attempt": "\ud800"}),
    "a wrong checksum": GOOD.replace(b"120", b"121"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_manifest_is_refused(refused: Any, name: str) -> None:
    refused("manifest", data=BROKEN[name])


def test_manifest_too_long_to_read_is_refused(refused: Any, tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate((1 << 28) + 1)
    refused("open_checkpoint", tmp_path)


def test_missing_container_is_an_error_with_its_path(attack: Any, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(GOOD)
    outcome = attack("open_checkpoint", tmp_path)
    assert outcome.error == "StorageError"
    assert "rank-00000.pt" in outcome.message


def test_every_flipped_bit_is_found() -> None:
    for position in range(len(GOOD)):
        for bit in range(8):
            damaged = bytearray(GOOD)
            damaged[position] ^= 1 << bit
            with pytest.raises(FormatError):
                manifest.decode(bytes(damaged), "manifest.json")


def test_every_truncation_is_found() -> None:
    for length in range(len(GOOD)):
        with pytest.raises(FormatError):
            manifest.decode(GOOD[:length], "manifest.json")


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_keeps_a_checkpoint_from_opening(tmp_path: Path, genuine: bytes, bit: int) -> None:
    golden = Path(__file__).parents[1] / "golden" / "manifest.json"
    (tmp_path / "container.pt").write_bytes(genuine)
    path = tmp_path / "manifest.json"
    good = golden.read_bytes()
    for position in range(bit, len(good), 8):
        damaged = bytearray(good)
        damaged[position] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(FormatError):
            open_checkpoint(tmp_path)
    path.write_bytes(good)
    assert open_checkpoint(tmp_path)[0].step == 120
