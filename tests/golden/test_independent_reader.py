"""A reader that was written from docs/format.md alone reads what the library wrote."""

from __future__ import annotations

import pickletools
import shutil
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from independent_reader import (
    cut,
    key_number,
    numbers,
    read_arrays,
    read_catalog,
    read_digests,
    read_index,
    read_manifest,
    text,
    values,
)

import datastates as ds
from datastates.commit import manifest
from datastates.providers import HostTensorProvider, PickledObjectProvider, from_state_dict
from datastates.storage import Location


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    grid = torch.arange(20, dtype=torch.float32).reshape(4, 5)
    return {
        "grid": grid,
        "transposed": grid.t(),
        "column": grid[:, 1:4],
        "large": torch.arange(100_000, dtype=torch.int64),
        "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
        "brain": torch.tensor([1.0, -1.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
        "host": np.array([[1, -2], [3, -4]], dtype=np.int16),
        "0": [torch.tensor([1.5], dtype=torch.float64), {"a/b": torch.tensor([2**63], dtype=torch.uint64)}],
    }


@pytest.fixture(scope="module")
def written(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("independent") / "checkpoint"
    providers = [
        from_state_dict("state", state),
        HostTensorProvider("host", {"weights": torch.tensor([3, 1, 2], dtype=torch.int32)}),
        PickledObjectProvider("loop", get=lambda: {"epoch": 4}, set=lambda value: None),
    ]
    ds.snapshot(providers, path, step=9, host_cache="4MiB", block="1MiB").wait_committed()
    return path


@pytest.fixture(scope="module")
def data(written: Path) -> bytes:
    return (written / "rank-00000.pt").read_bytes()


def test_manifest_names_the_container(written: Path, data: bytes) -> None:
    fields = read_manifest((written / "manifest.json").read_bytes())
    assert fields["format"] == 2
    assert fields["sequence"] > 10**12  # milliseconds since 1970
    index, _, crc = read_index(data)
    assert fields["containers"] == [{"file": "rank-00000.pt", "rank": 0, "nbytes": len(data), "index_crc32": crc}]
    assert index["identity"] == {"step": 9, "rank": 0, "world_size": 1, "attempt": fields["attempt"]}


def test_a_manifest_with_a_metric_has_the_specified_form(written: Path) -> None:
    opened = manifest.open(Location(written))
    for metric in (0.1, -0.0, 1e300, 3.0):
        fields = read_manifest(manifest.encode(opened.model_copy(update={"metric": metric})))
        assert str(fields["metric"]) == str(metric)


def test_arrays_have_their_values(data: bytes, state: dict[str, Any]) -> None:
    found = read_arrays(data)
    flat = {k: v for k, v in state.items() if k != "0"}
    flat |= {"~20/0": state["0"][0], "~20/1/a~1b": state["0"][1]["a/b"]}
    assert set(found) == {("state", key) for key in flat} | {("host", "weights")}
    for key, value in flat.items():
        kind, dtype, shape, elements = found["state", key]
        assert shape == tuple(value.shape)
        assert kind == (1 if key == "host" else 0)
        if key == "brain":  # the upper half of a float
            assert [struct.unpack("<f", b"\0\0" + e)[0] for e in elements] == value.tolist()
        else:
            assert values(dtype, elements) == value.reshape(-1).tolist()


def test_arrays_of_a_mapping_have_their_values(data: bytes) -> None:
    _, dtype, shape, elements = read_arrays(data)["host", "weights"]
    assert (dtype, shape, values(dtype, elements)) == (5, (3,), [3, 1, 2])


def test_views_share_a_record(data: bytes) -> None:
    index, _, _ = read_index(data)
    keys = cut(index["keys"], numbers(index["key_nbytes"], 4))
    record = dict(zip(keys, numbers(index["shards"]["record"], 4), strict=True))
    assert record[b"grid"] == record[b"transposed"] == record[b"column"] != record[b"large"]


def test_large_records_begin_on_a_page_and_small_ones_on_a_cache_line(data: bytes) -> None:
    index, _, _ = read_index(data)
    places = zip(numbers(index["data_offset"], 8), numbers(index["record_nbytes"], 8), strict=True)
    found = {(nbytes >= 65536, begin % (4096 if nbytes >= 65536 else 64)) for begin, nbytes in places}
    assert found == {(True, 0), (False, 0)}


def test_objects_are_pickles_of_their_own(data: bytes) -> None:
    index, _, _ = read_index(data)
    begin, nbytes, _ = index["pickle"]
    assert [o[:2] for o in index["objects"]] == [[0, b""], [2, b""]]
    for _, _, offset, length, crc in index["objects"]:
        assert begin <= offset
        assert offset + length <= begin + nbytes
        part = data[offset : offset + length]
        assert zlib.crc32(part) == crc
        written: set[int] = set()
        for opcode, argument, _ in pickletools.genops(b"\x80\x02" + part + b"."):
            assert opcode.proto <= 2
            if "PUT" in opcode.name:
                written.add(argument)
            assert "GET" not in opcode.name or argument in written


def test_frame_of_data_pkl_is_as_specified(data: bytes) -> None:
    index, _, _ = read_index(data)
    begin, nbytes, _ = index["pickle"]
    first, last = index["objects"]
    assert data[begin : first[2]] == b"\x80\x02}(" + text("state")
    between = data[first[2] + first[3] : last[2]]
    assert between.startswith(text("host") + b"}(" + text("weights") + b"ctorch._utils\n_rebuild_tensor_v2\n((")
    assert between.endswith(b"ccollections\nOrderedDict\n)RtRu" + text("loop"))
    assert data[last[2] + last[3] : begin + nbytes] == b"u."


def test_entries_are_the_specified_ones_in_order(written: Path, data: bytes) -> None:
    index, offset, crc = read_index(data)
    with zipfile.ZipFile(written / "rank-00000.pt") as archive:
        entries = archive.infolist()
        comment = archive.comment
    count = len(index["data_offset"]) // 8
    assert [e.filename for e in entries] == [f"archive/data/{i}" for i in range(count)] + [
        f"archive/{name}" for name in ("data.pkl", "byteorder", "version", ".datastates/index")
    ]
    assert all(e.compress_type == zipfile.ZIP_STORED and e.extract_version == 45 for e in entries)
    assert [e.flag_bits for e in entries] == [8] * count + [0] * 4
    assert [e.header_offset for e in entries[:count]] == list(numbers(index["header_offset"], 8))
    assert (entries[-1].file_size, entries[-1].CRC) == (len(msgpack_of(data)), crc)
    assert comment == data[-66:]
    assert offset % 64 == 0


def msgpack_of(data: bytes) -> bytes:
    _, offset, _ = read_index(data)
    return data[offset : offset + int(data[-66:][37:53], 16)]


def test_index_is_encoded_in_the_one_way(data: bytes) -> None:
    assert msgpack.packb(msgpack.unpackb(msgpack_of(data))) == msgpack_of(data)


def test_end_of_the_file_is_as_specified(data: bytes) -> None:
    index, offset, _ = read_index(data)
    entries = len(index["data_offset"]) // 8 + 4
    directory = offset + len(msgpack_of(data))
    end64 = len(data) - 164
    assert data[end64 : end64 + 56] == struct.pack(
        "<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, entries, entries, end64 - directory, directory
    )
    assert data[end64 + 56 : end64 + 76] == struct.pack("<4sIQI", b"PK\6\7", 0, end64, 1)
    assert data[end64 + 76 : end64 + 98] == struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 66
    )


def test_digests_are_those_of_the_definition(data: bytes) -> None:
    found = read_digests(data)
    # not in row-major order, or with gaps
    assert {key for key, digest in found.items() if digest is None} == {("state", "transposed"), ("state", "column")}
    elements = read_arrays(data)["state", "large"][3]
    assert found["state", "large"] == zlib.crc32(b"".join(elements)) ^ zlib.crc32(bytes(800_000))
    assert found["state", "empty"] == 0


def test_golden_digests_are_those_of_the_definition(golden: dict[str, Path]) -> None:
    found = read_digests(golden["container.pt"].read_bytes())
    unknown = {key for _, key in (k for k, digest in found.items() if digest is None)}
    assert unknown == {"transposed", "repeated", "box"}
    assert found["other/provider", "columns"]
    assert found["other/provider", "flat"]


def test_golden_container_reads_too(golden: dict[str, Path]) -> None:
    found = read_arrays(golden["container.pt"].read_bytes())
    assert values(*found["model", "repeated"][1::2]) == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    assert values(*found["other/provider", "ключ"][1::2]) == [12, 13]
    assert {dtype for _, dtype, _, _ in found.values()} == set(range(35))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_golden_nested_container_reads_too(nested: Path) -> None:
    """The reader compares every byte of the archives, and opens each of them alone."""
    found = read_arrays(nested.read_bytes())
    assert values(*found["m", "grid"][1::2]) == list(range(12))
    assert values(*found["m", "transposed"][1::2]) == [float(12 + 4 * j + i) for i in range(4) for j in range(3)]
    assert {dtype for _, dtype, _, _ in found.values()} == set(range(27))
    assert len(found) > 10  # so that some records' numbers have more digits than others


def test_what_is_written_nested_reads_too(state: dict[str, Any], tmp_path: Path, write_file: Any) -> None:
    state = {key: value for key, value in state.items() if key not in ("transposed", "column", "0")}
    write_file(tmp_path / "file.pt", state, nested=True).wait_committed()
    found = read_arrays((tmp_path / "file.pt").read_bytes())
    assert {key for _, key in found} == set(state)
    assert values(*found["file", "large"][1::2]) == state["large"].tolist()


def test_golden_catalog_says_who_holds_what(several: Path) -> None:
    fields = read_manifest((several / "manifest.json").read_bytes())
    entry = fields["catalog"]
    columns = read_catalog((several / entry["file"]).read_bytes(), entry)
    containers = [(several / c["file"]).read_bytes() for c in fields["containers"]]
    assert [c["file"] for c in fields["containers"]] == ["rank-00000.pt", "rank-00001.pt"]
    assert list(columns["nbytes"]) == [len(data) for data in containers]
    assert list(columns["index_crc"]) == [read_index(data)[2] for data in containers]
    found = {}
    for key in ("m/w", "m/cut", "m/alike", "m/none"):
        tensor = columns["key"].index(key_number(b"a", key))
        rows = range(columns["first"][tensor], columns["first"][tensor + 1])
        found[key] = [(columns["rank"][i], columns["begin"][i], columns["reach"][i]) for i in rows]
        # the parts' contributions combine to the catalog's digest, which is the tensor's but for a constant
        contributed = 0
        for data in containers:
            contributed ^= read_digests(data)["m", key[2:]] or 0
        assert columns["digested"][tensor] == 1
        assert columns["digest"][tensor] == contributed
    assert found == {
        "m/w": [(0, 0, 18), (1, 18, 24)],
        "m/cut": [(0, 0, 4), (1, 4, 10)],
        "m/alike": [(1, 0, 3)],
        "m/none": [(0, 0, 0)],
    }
    loop = columns["key"].index(key_number(b"o", "loop"))
    assert [columns["rank"][i] for i in range(columns["first"][loop], columns["first"][loop + 1])] == [0, 1]
    assert columns["digested"][loop] == 0
    assert len(columns["key"]) == 5


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_agrees(written: Path, state: dict[str, Any], mmap: bool) -> None:
    loaded = torch.load(written / "rank-00000.pt", weights_only=True, mmap=mmap)
    assert loaded["loop"] == {"epoch": 4}
    assert loaded["host"]["weights"].tolist() == [3, 1, 2]
    assert list(loaded["state"]) == list(state)
    assert torch.equal(loaded["state"]["host"], torch.from_numpy(state["host"]))
    for key in ("grid", "transposed", "column", "large", "half", "brain", "flags", "scalar", "empty"):
        assert torch.equal(loaded["state"][key], state[key])
    assert torch.equal(loaded["state"]["0"][1]["a/b"], state["0"][1]["a/b"])


def test_zipfile_agrees(written: Path) -> None:
    with zipfile.ZipFile(written / "rank-00000.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_agrees(written: Path) -> None:
    done = subprocess.run(["unzip", "-t", written / "rank-00000.pt"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
