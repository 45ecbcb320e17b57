"""The files in this folder pin the format: encoding gives their bytes, and decoding gives their values."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
import zlib
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frameworks import ABSENT

import datastates as ds
from datastates.commit import manifest
from datastates.container import index
from datastates.container.file import open_container
from datastates.container.index import encode_index
from datastates.formats import own
from datastates.formats.own import verify_catalog, verify_container
from datastates.reading.every_container import open_checkpoint
from datastates.reading.stored import Stored
from datastates.state import dtypes
from datastates.state.shards import full_key
from datastates.storage import Location

WITHOUT = "torch is not installed: what it makes of the golden files was NOT looked at"
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def content(array: Any) -> bytes:
    """The elements of an array in row-major order."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    torch = pytest.importorskip("torch", reason=WITHOUT)
    return bytes(array.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def expected(made: SimpleNamespace, row: Any) -> bytes:
    """The elements of a row, picked out of its record one by one."""
    _, _, _, dtype, record, offset, shape, stride, _ = row
    size = dtypes.BY_NAME[dtype].itemsize
    places = (offset + size * sum(map(int.__mul__, at, stride)) for at in product(*map(range, shape)))
    return b"".join(made.RECORDS[record][p : p + size] for p in places)


def arrays_of(value: dict[str, Any], made: SimpleNamespace) -> dict[tuple[int, str], Any]:
    """The arrays of a loaded golden container by provider and key; asserts that nothing else is there."""
    model, other, plain = (value.pop(name) for name in made.PROVIDERS)
    assert value == {}
    assert other.pop("object") == ("text", 3)
    assert model.pop("tied") is model["weight"]
    assert same(model.pop("object"), made.OBJECT)
    model["nested/0/scalar"] = model.pop("nested")[0]["scalar"]
    return {(p, key): array for p, items in enumerate((model, other, plain)) for key, array in items.items()}


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", ["container.pt", "manifest.json", "manifest-2.json"])
def test_encoding_gives_the_golden_bytes(made: SimpleNamespace, golden: dict[str, Path], name: str) -> None:
    assert made.build()[name] == golden[name].read_bytes()


def test_encoding_gives_the_golden_bytes_of_a_nested_container(made: SimpleNamespace, nested: Path) -> None:
    assert made.build_nested() == nested.read_bytes()


def test_golden_nested_container_loads_and_verifies(made: SimpleNamespace, nested: Path) -> None:
    source = open_container(nested)
    assert source.index.nested
    assert list(verify_container(source, lambda _: None)) == []
    torch = pytest.importorskip("torch", reason=WITHOUT)
    for found in (torch.load(nested, weights_only=True)["m"], ds.load(nested)["m"]):
        assert list(found) == list(made.ARCHIVES)
        for key, (dtype, shape, stride, _) in made.ARCHIVES.items():
            assert (str(found[key].dtype), tuple(found[key].shape)) == (f"torch.{dtype}", shape)
            assert found[key].stride() == stride


def test_encoding_gives_the_golden_bytes_of_a_container_with_hashes(made: SimpleNamespace, hashed: Path) -> None:
    assert made.build(hashed=True)["container.pt"] == hashed.read_bytes()


def test_golden_container_with_hashes_verifies(made: SimpleNamespace, golden: dict[str, Path], hashed: Path) -> None:
    source, plain = open_container(hashed), open_container(golden["container.pt"])
    name, chunks, arrays = source.index.hashes or ("", b"", b"")
    assert (name, len(chunks), len(arrays)) == ("blake2b-128", 16 * len(source.index.chunk_crc), 16 * len(made.ROWS))
    assert plain.index.hashes is None
    assert list(verify_container(source, lambda _: None)) == []


def test_golden_container_with_hashes_loads(made: SimpleNamespace, golden: dict[str, Path], hashed: Path) -> None:
    pytest.importorskip("torch", reason=WITHOUT)
    found, as_before = (arrays_of(ds.load(path, trust="all"), made) for path in (hashed, golden["container.pt"]))
    assert {key: content(array) for key, array in found.items()} == {
        key: content(array) for key, array in as_before.items()
    }


def test_encoding_gives_the_golden_bytes_of_several_ranks(made: SimpleNamespace, several: Path) -> None:
    assert made.build_several() == {file.name: file.read_bytes() for file in several.iterdir()}


def test_golden_checkpoint_of_several_ranks_loads_and_verifies(made: SimpleNamespace, several: Path) -> None:
    with ds.open(several) as checkpoint:
        for key, whole in made.WHOLE.items():
            assert content(checkpoint[f"m/{key}"]) == whole.tobytes()
            assert checkpoint.digest(f"m/{key}") == f"{zlib.crc32(whole.tobytes()):08x}"
    loaded = ds.load(several)
    assert {key: content(array) for key, array in loaded["m"].items()} == {
        key: whole.tobytes() for key, whole in made.WHOLE.items()
    }
    assert loaded["loop"] == {"rank": 0}
    head, containers = Stored.open(several).head, open_checkpoint(several)[1]
    assert [p for one in containers for p in verify_container(one, lambda _: None)] == []
    assert list(verify_catalog(head, dict(enumerate(containers)), lambda _: None)) == []


def test_encoding_gives_the_golden_bytes_of_a_kept_container(made: SimpleNamespace, kept: Path) -> None:
    assert made.build_kept() == {file.name: file.read_bytes() for file in kept.iterdir()}


def test_golden_checkpoint_with_a_kept_container_loads_and_verifies(made: SimpleNamespace, kept: Path) -> None:
    wholes = {key: made.WHOLE[key].tobytes() for key in ("w", "cut", "none")}
    with ds.open(kept) as checkpoint:
        assert list(checkpoint) == [f"m/{key}" for key in wholes]
        assert {key: content(checkpoint[f"m/{key}"]) for key in wholes} == wholes
        assert [checkpoint.digest(f"m/{key}") for key in wholes] == [f"{zlib.crc32(d):08x}" for d in wholes.values()]
    loaded = ds.load(kept)
    assert {key: content(array) for key, array in loaded["m"].items()} == wholes
    assert loaded["loop"] == {"rank": 0}
    assert list(own.open(Location(kept)).verify(lambda _: None)) == []
    torch = pytest.importorskip("torch", reason=WITHOUT)
    found = torch.load(kept / "rank-00000.kept.pt", weights_only=True)
    assert {key: content(array) for key, array in found["m"].items()} == {"cut": wholes["cut"]}


def test_golden_container_holds_every_element_type(golden: dict[str, Path]) -> None:
    assert set(open_container(golden["container.pt"]).index.shards.dtype.tolist()) == {d.code for d in dtypes.ALL}


def test_decoding_gives_the_golden_rows(made: SimpleNamespace, golden: dict[str, Path]) -> None:
    table = open_container(golden["container.pt"]).index.shards
    assert table.providers == made.PROVIDERS
    assert len(table) == len(made.ROWS)
    for i, (provider, key, kind, dtype, _, offset, shape, stride, part) in enumerate(made.ROWS):
        row = table.row(i)
        assert (int(table.provider[i]), table.keys[i], table.kind[i]) == (provider, key, kind)
        assert (row.dtype.name, row.offset, row.shape, row.stride) == (dtype, offset, shape, stride)
        assert row.global_shape == (shape if part is None else part[0])
        assert row.box == (None if key == "flat" else (0,) * len(shape) if part is None else part[1])
        assert row.flat == (part[1] if key == "flat" else None)


def test_decoding_gives_the_golden_identity(made: SimpleNamespace, golden: dict[str, Path]) -> None:
    assert open_container(golden["container.pt"]).index.identity == made.IDENTITY


def test_decoding_the_golden_index_and_encoding_it_gives_the_same_bytes(golden: dict[str, Path]) -> None:
    opened = open_container(golden["container.pt"])
    data = golden["container.pt"].read_bytes()[opened.index_offset :]
    encoded = encode_index(opened.index)
    assert data[: len(encoded)] == encoded


def test_golden_container_verifies(golden: dict[str, Path]) -> None:
    source, seen = open_container(golden["container.pt"]), []
    assert list(verify_container(source, seen.append)) == []
    assert sum(seen) == golden["container.pt"].stat().st_size


def test_loading_gives_the_golden_values(made: SimpleNamespace, golden: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch", reason=WITHOUT)
    found = arrays_of(ds.load(golden["container.pt"]), made)
    assert set(found) == {row[:2] for row in made.ROWS}
    for row in made.ROWS:
        array = found[row[:2]]
        assert tuple(array.shape) == row[6]
        assert content(array) == expected(made, row)
        assert isinstance(array, torch.Tensor if row[2] == 0 else np.ndarray)


@pytest.mark.skipif("torch" not in ABSENT, reason="torch is installed: `make python-test-numpy` opens them without it")
def test_numpy_opens_the_golden_values(made: SimpleNamespace, golden: dict[str, Path]) -> None:
    """What torch saved, too: types that NumPy lacks are those of ml_dtypes. A type that only torch has is named."""
    refused = set()
    with ds.open(golden["container.pt"]) as opened:
        for row in made.ROWS:
            full, dtype = full_key(made.PROVIDERS[row[0]], row[1]), dtypes.BY_NAME[row[3]]
            if dtype.numpy is None:
                with pytest.raises(ImportError, match=f"is of type {dtype.name}, which NumPy lacks: install torch"):
                    opened[full]
                refused.add(dtype.name)
                continue
            if row[8] is not None:  # a part of a tensor whose other parts are in no file
                continue
            array = opened[full]
            assert isinstance(array, np.ndarray)
            assert (array.dtype.name, array.shape) == (dtype.name, row[6])
            assert content(array) == expected(made, row)
    assert "complex32" in refused
    assert "bfloat16" not in refused


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_gives_the_golden_values(made: SimpleNamespace, golden: dict[str, Path], mmap: bool) -> None:
    torch = pytest.importorskip("torch", reason=WITHOUT)
    found = arrays_of(torch.load(golden["container.pt"], weights_only=True, mmap=mmap), made)
    assert set(found) == {row[:2] for row in made.ROWS}
    for row in made.ROWS:
        tensor = found[row[:2]]
        dtype = f"torch.{row[3] if row[3] in dtypes.TORCH else 'uint8'}"
        assert (str(tensor.dtype), tuple(tensor.shape), tensor.stride()) == (dtype, row[6], row[7])
        assert tensor.device.type == "cpu"
        assert content(tensor) == expected(made, row)


def test_torch_load_finds_parameters_and_shared_storage(golden: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch", reason=WITHOUT)
    model = torch.load(golden["container.pt"], weights_only=True)["model"]
    assert type(model["weight"]) is torch.nn.Parameter
    assert model["weight"].requires_grad
    storages = {model[k].untyped_storage().data_ptr() for k in ("weight", "transposed", "tail", "repeated")}
    assert len(storages) == 1


def test_zipfile_accepts_the_golden_container(golden: dict[str, Path]) -> None:
    with zipfile.ZipFile(golden["container.pt"]) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[-4:] == [
            f"archive/{name}" for name in ("data.pkl", "byteorder", "version", ".datastates/index")
        ]


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_accepts_the_golden_container(golden: dict[str, Path]) -> None:
    done = subprocess.run(["unzip", "-t", golden["container.pt"]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_decoding_gives_the_golden_manifest(golden: dict[str, Path]) -> None:
    decoded = manifest.decode(golden["manifest.json"].read_bytes(), "manifest.json")
    entry = decoded.containers[0]
    assert (decoded.format, decoded.step, decoded.attempt, decoded.world_size) == (1, 120, "9f86d081", 1)
    assert decoded.created == "2026-01-31T12:00:00+00:00"
    assert len(decoded.containers) == 1
    assert (entry.file, entry.rank, entry.nbytes) == ("container.pt", 0, golden["container.pt"].stat().st_size)


def test_each_format_of_the_page_about_versions_has_a_golden_file(golden: dict[str, Path], kept: Path) -> None:
    manifests = [manifest.decode(golden[n].read_bytes(), n) for n in ("manifest.json", "manifest-2.json")]
    manifests.append(manifest.open(Location(kept)))
    assert [m.format for m in manifests] == [1, manifest.FORMAT_VERSION, manifest.WITH_KEPT] == [1, 2, 3]
    assert [m.sequence for m in manifests] == [None, 7, 7]
    page = (Path(__file__).parents[2] / "docs" / "versions.md").read_text("utf-8")
    release = ".".join(ds.__version__.split(".")[:2])
    assert f"\n| {release} | {index.FORMAT_VERSION} | {manifest.FORMAT_VERSION}, or {manifest.WITH_KEPT} with " in page


def test_golden_files_open_as_a_checkpoint(golden: dict[str, Path]) -> None:
    opened, containers = open_checkpoint(golden["manifest.json"].parent)
    assert opened.step == 120
    assert [c.path for c in containers] == [golden["container.pt"]]


def test_example_manifest_of_the_format_page_decodes(golden: dict[str, Path]) -> None:
    page = golden["manifest.json"].parents[2] / "docs" / "format.md"
    example = re.search(r"```json\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert example is not None
    assert manifest.decode(example[1].encode(), "example").step == 120
