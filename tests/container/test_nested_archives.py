"""Nested containers: each record is an archive that opens alone, and the file stays a container."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

import datastates as ds
from datastates._base.sizes import CHUNK
from datastates.cli import commands
from datastates.container import archive, checksums, nested_archives
from datastates.container.file import Container, open_container
from datastates.errors import FormatError, ProviderError
from datastates.formats.own import verify_container
from datastates.planning import write
from datastates.state import dtypes

# torch warns everybody who touches such tensors
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

BLOCK = 1 << 20


def archives(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each record's key and the bytes of its archive."""
    source = open_container(path)
    nest = archive.nest_of(source.index)
    assert nest is not None
    data = path.read_bytes()
    begin, nbytes = nest.places(source.index.records)
    for record, (first, length) in enumerate(zip(begin.tolist(), nbytes.tolist(), strict=True)):
        yield source.name_record(record).removeprefix("file/"), data[first : first + length]


def problems(path: Path) -> list[str]:
    return [f"{p.key} {p.what}" for p in verify_container(open_container(path), lambda _: None)]


def check(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Check that all ways to read the file give the state."""
    found = dict(archives(path))
    assert set(found) == set(state)
    for key, data in found.items():
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            state[key].dtype,
            state[key].shape,
            state[key].stride(),
        )
        assert content(tensor) == content(state[key]), key
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            check_apart(archive, data)
    for whole in (torch.load(path, weights_only=True), torch.load(path, weights_only=True, mmap=True), ds.load(path)):
        assert isinstance(whole, dict)
        for key, tensor in state.items():
            assert content(whole[key]) == content(tensor), key
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert problems(path) == []


def check_apart(archive: zipfile.ZipFile, data: bytes) -> None:
    """Check that entries do not overlap: unzip and newer versions of zipfile take that for a zip bomb."""
    end = 0
    for entry in sorted(archive.infolist(), key=lambda e: e.header_offset):
        assert entry.header_offset == end
        name, extra = struct.unpack("<HH", data[end + 26 : end + 30])
        end += 30 + name + extra + entry.file_size + (24 if entry.flag_bits & 8 else 0)
    assert end <= archive.start_dir


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = torch.arange(nbytes, dtype=torch.int64).remainder(2 if dtype is torch.bool else 97).to(torch.uint8)
    return data.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


def test_every_element_type_opens_by_itself(tmp_path: Path, write_file: Any) -> None:
    types = [getattr(torch, d.name) for d in dtypes.ALL if d.in_torch]
    state = {str(t): filled((3, 2), t) for t in types}
    assert {"torch.bfloat16", "torch.bool", "torch.float8_e4m3fn", "torch.complex64"} <= set(state)
    write_file(tmp_path / "file.pt", state, nested=True).wait_committed()
    check(tmp_path / "file.pt", state)


def test_every_shape_and_stride_opens_by_itself(tmp_path: Path, write_file: Any) -> None:
    grid = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty in the middle": torch.empty(3, 0, 2, dtype=torch.int64),
        "transposed": grid.clone().t(),
        "columns": grid.clone()[:, 1:5],
        "every other": torch.arange(40, dtype=torch.int16)[::2],
        "repeated": torch.arange(3.0).expand(5, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "many dimensions": torch.arange(2.0).reshape((1,) * 30 + (2,)),
    }
    write_file(tmp_path / "file.pt", state, nested=True).wait_committed()
    check(tmp_path / "file.pt", state)


@pytest.mark.parametrize("count", [1, 9, 10, 11, 12, 123])
def test_any_number_of_records(tmp_path: Path, write_file: Any, count: int) -> None:
    state = {f"t{i}": torch.full((i % 7 + 1, 3), i, dtype=torch.int32) for i in range(count)}
    write_file(tmp_path / "file.pt", state, nested=True).wait_committed()
    check(tmp_path / "file.pt", state)


def test_no_record_at_all(tmp_path: Path, write_file: Any) -> None:
    write_file(tmp_path / "file.pt", {"n": 3}, nested=True).wait_committed()
    assert open_container(tmp_path / "file.pt").index.nested
    assert list(archives(tmp_path / "file.pt")) == []
    assert torch.load(tmp_path / "file.pt") == {"n": 3}
    assert problems(tmp_path / "file.pt") == []


def test_records_over_several_extents(tmp_path: Path, write_file: Any) -> None:
    # page-aligned records of about an extent's length: their checksums lie in other extents than their data
    sizes = [65_536, 65_535, BLOCK, BLOCK + 1, 2 * BLOCK - 5000, 3 * BLOCK + 4096, 5, 700_000, 349_000, 349_001]
    state = {f"t{i}": filled((n,), torch.uint8) for i, n in enumerate(sizes)}
    path = tmp_path / "file.pt"
    write_file(path, state, nested=True).wait_committed()
    check(path, state)
    index = open_container(path).index
    assert not (index.records.data_offset[index.records.nbytes >= 65_536] % 4096).any()


def test_checksums_are_patched_wherever_the_cuts_fall() -> None:
    """No extent ends inside a checksum, and all copies are patched, except the last record's copy in the tail."""
    random = np.random.default_rng(5)
    for _ in range(40):
        sizes = random.integers(0, 3 * CHUNK, 20).astype(np.uint64)
        headers = np.full(20, 1500, np.uint64)
        plan = write.plan_write(sizes, np.zeros(20, np.uint8), headers, 4 * CHUNK, nested_archives.CRC_PLACES)
        found = (plan.extent_offset[plan.patch_extent.astype(np.int64)] + plan.patch_offset).astype(np.int64)
        end = plan.data_offset.astype(np.int64) + sizes[plan.order].astype(np.int64)
        expected = [at + place for at in end.tolist() for place in nested_archives.CRC_PLACES]
        assert found.tolist() == expected[:-1]
        assert (plan.patch_offset + 4 <= plan.extent_length[plan.patch_extent.astype(np.int64)]).all()
        assert plan.patch_source.tolist() == np.repeat(plan.order, 2).tolist()[:-1]


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_agrees(tmp_path: Path, write_file: Any) -> None:
    write_file(tmp_path / "file.pt", {"a": torch.arange(30_000), "b": torch.ones(3)}, nested=True).wait_committed()
    for _, data in archives(tmp_path / "file.pt"):
        (tmp_path / "alone.pt").write_bytes(data)
        done = subprocess.run(["unzip", "-t", tmp_path / "alone.pt"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(["unzip", "-t", tmp_path / "file.pt"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_archive_is_laid_out_as_torch_does(tmp_path: Path, write_file: Any) -> None:
    """``torch.save`` writes entries of the same names, and the same bytes in three of them."""
    state = {"a": torch.arange(5.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    write_file(tmp_path / "file.pt", state, nested=True).wait_committed()
    for key, data in archives(tmp_path / "file.pt"):
        torch.save(state[key], tmp_path / "archive.pt")
        with zipfile.ZipFile(io.BytesIO(data)) as ours, zipfile.ZipFile(tmp_path / "archive.pt") as theirs:
            assert set(ours.namelist()) <= set(theirs.namelist())
            for name in ("byteorder", "version", "data/0"):
                assert ours.read(f"archive/{name}") == theirs.read(f"archive/{name}")


# --- damage


@pytest.fixture
def small(tmp_path: Path, write_file: Any) -> Path:
    path = tmp_path / "file.pt"
    write_file(path, {"a": torch.arange(3.0), "b": torch.ones(2, 2), "c": torch.zeros(0)}, nested=True).wait_committed()
    return path


@pytest.mark.by_hand
@pytest.mark.long
def test_verify_names_every_flipped_bit(small: Path) -> None:
    good = small.read_bytes()
    index = open_container(small).index
    records = index.records
    data = {at for b, n in zip(records.data_offset, records.nbytes, strict=True) for at in range(int(b), int(b + n))}
    missed = []
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        small.write_bytes(damaged)
        try:
            said = problems(small)
        except FormatError as error:  # the index or the footer is damaged
            said = [str(error)]
        if not said or (position < index.pickle_offset and position not in data and "framing" not in said[0]):
            missed.append(position)
    assert missed == []
    assert len(good) < 10_000


def test_the_command_line_verifies_it(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["verify", str(small)]) == 0
    data = bytearray(small.read_bytes())
    data[nested_archives.ROOM + 3] ^= 1  # a byte before the first archive's data
    small.write_bytes(data)
    assert commands.main(["verify", str(small)]) == 1
    said = capsys.readouterr()
    assert "file framing at byte 0" in said.out + said.err


# --- an index that lies


def resigned(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Edit the index of the file, and write a footer that fits it."""
    data = path.read_bytes()
    footer = data[-archive.FOOTER_NBYTES :].decode()
    offset, nbytes = int(footer[20:36], 16), int(footer[37:53], 16)
    fields = msgpack.unpackb(data[offset : offset + nbytes])
    edit(fields)
    encoded = msgpack.packb(fields)
    ending = data[offset + nbytes : -archive.FOOTER_NBYTES]
    signed = f"datastates/01 index={offset:016x}+{len(encoded):016x} crc={checksums.crc32(encoded):08x}"
    path.write_bytes(data[:offset] + encoded + ending + signed.encode())
    return path


@pytest.mark.parametrize("wrong", [False, None, 1, 1.0, 0, "x", b"", [], [True], {}])
def test_nested_is_true_or_not_there(small: Path, wrong: object) -> None:
    resigned(small, lambda fields: fields.update(nested=wrong))
    with pytest.raises(FormatError, match="nested is there"):
        open_container(small)


def test_a_file_that_only_says_that_it_is_nested(tmp_path: Path, write_file: Any) -> None:
    """Its headers are too short for archives, and verifying says so."""
    path = tmp_path / "file.pt"
    write_file(path, {"a": torch.arange(3.0), "b": torch.ones(2, 2)}).wait_committed()
    source = open_container(resigned(path, lambda fields: fields.update(nested=True)))
    assert source.index.nested
    with pytest.raises(FormatError, match="no room"):
        list(verify_container(source, lambda _: None))


def test_a_record_that_holds_no_array(tmp_path: Path, write_file: Any) -> None:
    path = tmp_path / "file.pt"
    write_file(path, {"a": torch.arange(3.0), "b": torch.ones(3)}, nested=True).wait_committed()

    def move(fields: dict[str, Any]) -> None:
        fields["shards"]["record"] = bytes(8)

    source = open_container(resigned(path, move))
    with pytest.raises(FormatError, match="without an array"):
        archive.nest_of(source.index)
    with pytest.raises(FormatError, match="without an array"):
        list(verify_container(source, lambda _: None))


@pytest.mark.parametrize("by", [-64, 64])
def test_data_pkl_elsewhere(small: Path, by: int) -> None:
    """The index may place data.pkl anywhere within the longest header's reach; verifying finds the wrong place."""

    def move(fields: dict[str, Any]) -> None:
        fields["pickle"][0] += by
        for stored in fields["objects"]:
            stored[2] += by

    resigned(small, move)
    assert problems(small)


def test_data_pkl_beyond_the_longest_header(small: Path) -> None:
    with pytest.raises(FormatError, match=r"data\.pkl"):
        open_container(resigned(small, lambda fields: fields["pickle"].__setitem__(0, fields["pickle"][0] + 65_536)))


def test_a_header_of_another_length_is_damage(small: Path) -> None:
    """Where the index puts the second header one byte later, other bytes must frame the records."""
    source = open_container(small)
    index = source.index
    assert not (index.records.data_offset - index.records.header_offset > 0xFFFF).any()
    moved = index.records.header_offset + np.array([0, 1, 0], np.uint64)
    shifted = replace(index, records=replace(index.records, header_offset=moved))
    assert archive.frame_ranges(index) != archive.frame_ranges(shifted)


# --- what cannot be nested


def test_shared_memory_of_two_shapes_is_refused_by_name(tmp_path: Path, write_file: Any) -> None:
    grid = torch.arange(6.0)
    with pytest.raises(ProviderError, match="'file/b' shares memory with an array of another shape"):
        write_file(tmp_path / "file.pt", {"a": grid, "b": grid.view(2, 3)}, nested=True)
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_of_one_shape_is_stored_once(tmp_path: Path, write_file: Any) -> None:
    path = tmp_path / "file.pt"
    grid = torch.arange(6.0)
    write_file(path, {"a": grid, "b": grid.view(6)}, nested=True).wait_committed()
    assert len(open_container(path).index.records) == 1
    (_, data), *others = archives(path)
    assert not others
    assert torch.equal(torch.load(io.BytesIO(data)), grid)
    loaded = torch.load(path)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert problems(path) == []


def test_a_plan_is_kept_for_one_kind_of_file(tmp_path: Path, write_file: Any) -> None:
    state = {"a": torch.arange(3.0)}
    for number, is_nested in enumerate((True, False, True)):
        path = tmp_path / f"{number}.pt"
        write_file(path, state, nested=is_nested).wait_committed()
        source: Container = open_container(path)
        assert source.index.nested is is_nested
        room = int(source.index.records.data_offset[0] - source.index.records.header_offset[0])
        assert (room > 256) is is_nested
        assert problems(path) == []
