"""Random damage and random lies are refused with a DatastatesError, or read within bounds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastates.commit import manifest
from datastates.container import archive, checksums
from datastates.container.table import KINDS
from datastates.errors import DatastatesError, FormatError
from datastates.formats.own import verify_container
from datastates.reading.every_container import open_checkpoint
from datastates.state import dtypes

RELAXED = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
GOLDEN = Path(__file__).parents[1] / "golden"
CONTAINER, MANIFEST = (GOLDEN / "container.pt").read_bytes(), (GOLDEN / "manifest.json").read_bytes()


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Some edits of a file: bytes replaced, removed, inserted or moved."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([1, 1, 2, 8, 64, 1024]))
        match draw(st.sampled_from(["set", "remove", "insert", "copy"])):
            case "set":
                data[at : at + length] = draw(st.binary(min_size=length, max_size=length))
            case "remove":
                del data[at : at + length]
            case "insert":
                data[at:at] = draw(st.binary(max_size=length))
            case "copy":
                there = draw(st.integers(0, len(data)))
                data[at : at + length] = data[there : there + length]
    return bytes(data)


@RELAXED
@given(data=damaged(CONTAINER))
def test_damaged_container_does_not_verify(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(MANIFEST)
    (tmp_path / "container.pt").write_bytes(data)
    try:
        problems = list(verify_container(open_checkpoint(tmp_path)[1][0], lambda _: None))
    except DatastatesError:
        return
    assert (problems == []) == (data == CONTAINER)


@settings(RELAXED, max_examples=300)
@given(data=damaged(MANIFEST))
def test_damaged_manifest_does_not_decode(data: bytes) -> None:
    if data == MANIFEST:
        return
    with pytest.raises(FormatError):
        manifest.decode(data, "manifest.json")


@settings(RELAXED, max_examples=200)
@given(data=st.binary(max_size=400) | damaged(MANIFEST[:40]))
def test_noise_is_no_manifest(data: bytes) -> None:
    with pytest.raises(FormatError):
        manifest.decode(data, "manifest.json")


FOOTER = CONTAINER[-archive.FOOTER_NBYTES :].decode()
OFFSET, NBYTES = int(FOOTER[20:36], 16), int(FOOTER[37:53], 16)
INDEX = CONTAINER[OFFSET : OFFSET + NBYTES]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=40)
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3), max_leaves=5
)


@st.composite
def lies(draw: st.DrawFn) -> bytes:
    """An index with a few values replaced, or with bytes of its columns changed."""
    fields: dict[str, Any] = msgpack.unpackb(INDEX)
    for _ in range(draw(st.integers(1, 3))):
        home = draw(
            st.sampled_from([fields, fields.get("shards")] if isinstance(fields.get("shards"), dict) else [fields])
        )
        if not home:
            continue
        name = draw(st.sampled_from(sorted(home)))
        if isinstance(home[name], bytes) and home[name] and draw(st.integers(0, 5)):
            data = bytearray(home[name])
            at = draw(st.integers(0, len(data) - 1))
            data[at] = draw(st.sampled_from([0, 1, 2, 3, 127, 128, 255]) | st.integers(0, 255))
            home[name] = bytes(data)
        else:
            home[name] = draw(VALUES)
    return bytes(msgpack.packb(fields))


def with_index(index: bytes, path: Path) -> Path:
    """The container with another index, whose checksum is right."""
    ending = CONTAINER[-archive.ENDING_NBYTES : -archive.FOOTER_NBYTES]
    footer = f"datastates/01 index={OFFSET:016x}+{len(index):016x} crc={checksums.crc32(index):08x}"
    path.write_bytes(CONTAINER[:OFFSET] + index + ending + footer.encode())
    return path


@pytest.mark.by_hand
@settings(RELAXED, max_examples=150)
@given(index=lies() | damaged(INDEX))
def test_lying_index_is_refused_or_read_within_bounds(attack: Any, index: bytes) -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        attack("load", with_index(index, directory / "container.pt"))
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("kind", ["numpy", "cupy"])
def test_types_of_torch_in_another_library_are_refused(refused: Any, kind: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = msgpack.unpackb(INDEX)
    shards = fields["shards"]
    row = shards["dtype"].index(dtypes.BY_NAME["bits8"].code)
    kinds = bytearray(shards["kind"])
    kinds[row] = KINDS.index(kind)
    shards["kind"] = bytes(kinds)
    outcome = refused("load", with_index(msgpack.packb(fields), tmp_path / "container.pt"))
    assert "bits8' is of an element type that only torch has" in outcome.message


BEGIN, LENGTH, _ = msgpack.unpackb(INDEX)["pickle"]
PICKLE = CONTAINER[BEGIN : BEGIN + LENGTH]


@pytest.mark.long
@settings(RELAXED, max_examples=200)
@given(data=damaged(PICKLE) | st.binary(max_size=200).map(lambda b: b"\x80\x02" + b + b"."))
def test_damaged_pickle_is_refused_or_read_within_bounds(attack: Any, data: bytes) -> None:
    attack("loads", data=data)
