"""Files of torch's own writer: read in ranges, verified where they can be, and never worse than torch reads them."""

from __future__ import annotations

import functools
import io
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from datastates import dtypes
from datastates.adapters.dcp import DataStatesStorageReader
from datastates.errors import CorruptError, DatastatesError, FormatError
from datastates.reads import Tally
from states import Parts, blank, every_kind, filled, loaded, same, save_with

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
MIB = 1 << 20


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is left to torch's own reader, as it is read."""
    names: list[str] = []
    original = FileSystemReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        names.extend(item.storage_index.fqn for item in plan.items)
        return original(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", read_data)
    return names


@pytest.fixture
def without_checksums() -> Iterator[None]:
    """Torch computes no checksums."""
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def load(path: Path, into: dict[str, Any]) -> Tally:
    reader = DataStatesStorageReader(path)
    dcp.load(into, storage_reader=reader)
    assert reader.tally is not None
    return reader.tally


def failure(path: Path, state: dict[str, Any]) -> BaseException:
    with pytest.raises(CheckpointException) as raised:
        load(path, blank(state))
    ((found, _),) = raised.value.failures.values()
    return found  # type: ignore[no-any-return]


def places(path: Path) -> dict[str, Any]:
    """By name, where torch's metadata says that a tensor is."""
    storage = pickle.loads((path / ".metadata").read_bytes()).storage_data
    return {index.fqn: info for index, info in storage.items()}


def rewrite(path: Path, change: Callable[[bytes], bytes], name: str = "w") -> None:
    """Put another archive into the place of a tensor, which lies at its file's end."""
    info = places(path)[name]
    file = path / info.relative_path
    data = file.read_bytes()
    assert len(data) == info.offset + info.length
    made = change(data[info.offset :])
    file.write_bytes(data[: info.offset] + made)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for index, found in metadata.storage_data.items():
        if index.fqn == name:
            object.__setattr__(found, "length", len(made))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def archived(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def records(archive: bytes) -> dict[str, zipfile.ZipInfo]:
    return {info.filename: info for info in zipfile.ZipFile(io.BytesIO(archive)).infolist()}


def data_of(archive: bytes, name: str = "archive/data/0") -> int:
    """Where the data of a record begins."""
    header = records(archive)[name].header_offset
    return header + 30 + sum(struct.unpack_from("<HH", archive, header + 26))


# --- what is read


def test_whole_loads_are_verified_and_read_once(tmp_path: Path, by_torch: list[str]) -> None:
    state = {"large": torch.arange(MIB, dtype=torch.float32), "small": torch.ones(100), "seven": torch.tensor(7.0)}
    save_with("stock", state, tmp_path)
    into = blank(state)
    tally = load(tmp_path, into)
    same(into, state)
    assert tally.needed_nbytes == 4 * MIB + 404
    assert tally.read_nbytes < tally.needed_nbytes + 5 * 4096
    assert tally.unverified_nbytes == 0
    assert tally.unverified_keys == ()
    assert by_torch == []


def test_parts_are_read_alone_and_counted(tmp_path: Path, by_torch: list[str]) -> None:
    whole = torch.arange(1 << 22, dtype=torch.float32).reshape(4096, 1024)
    save_with("stock", {"w": whole, "other": torch.ones(MIB)}, tmp_path)
    for first, rows in ((0, 2048), (2048, 2048), (1001, 3)):
        part = Parts.of((4096, 1024), {(first, 0): torch.zeros(rows, 1024)})
        tally = load(tmp_path, {"w": part})
        assert torch.equal(part.boxes[first, 0], whole[first : first + rows])
        assert tally.needed_nbytes == tally.unverified_nbytes == rows * 4096
        assert tally.read_nbytes <= rows * 4096 + 2 * 4096
        assert tally.unverified_keys == ("w",)
    for width in (5, 512, 900):
        columns = Parts.of((4096, 1024), {(100, 7): torch.zeros(300, width)})
        tally = load(tmp_path, {"w": columns})
        assert torch.equal(columns.boxes[100, 7], whole[100:400, 7 : 7 + width])
        assert tally.needed_nbytes == 300 * width * 4
        assert tally.read_nbytes <= 2 * tally.needed_nbytes
    assert by_torch == []


def test_the_whole_of_one_and_a_part_of_another(tmp_path: Path) -> None:
    whole = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    boxes = {(0, 0): whole[:512], (512, 0): whole[512:]}
    save_with("stock", {"w": Parts.of((1024, 1024), boxes), "v": whole}, tmp_path)
    part = Parts.of((1024, 1024), {(0, 0): torch.zeros(600, 1024)})
    into = {"w": part, "v": torch.zeros(1024, 1024)}
    tally = load(tmp_path, into)
    assert torch.equal(part.boxes[0, 0], whole[:600])
    assert torch.equal(into["v"], whole)
    assert tally.unverified_nbytes == 88 * 4096
    assert tally.unverified_keys == ("w@512,0",)


def change_places(path: Path, change: Callable[[dict[Any, Any]], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata.storage_data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_one_tensor_that_is_wanted_twice(tmp_path: Path, by_torch: list[str]) -> None:
    whole = torch.arange(70_000.0).reshape(100, 700)
    save_with("stock", {"a": whole, "b": torch.zeros(100, 700)}, tmp_path)

    def tie(storage: dict[Any, Any]) -> None:
        (place,) = (info for index, info in storage.items() if index.fqn == "a")
        storage.update(dict.fromkeys(storage, place))

    change_places(tmp_path, tie)
    parts = Parts.of((100, 700), {(0, 0): torch.zeros(100, 700), (50, 0): torch.zeros(50, 700)})
    into = {"a": torch.zeros(100, 700), "b": parts}
    tally = load(tmp_path, into)
    assert torch.equal(into["a"], whole)
    assert torch.equal(parts.boxes[0, 0], whole)
    assert torch.equal(parts.boxes[50, 0], whole[50:])
    assert tally.needed_nbytes == 280_000
    assert tally.unverified_nbytes == 0
    assert tally.unverified_keys == ()
    assert by_torch == []
    file, info = tmp_path / "__0_0.distcp", places(tmp_path)["a"]
    data = bytearray(file.read_bytes())
    data[info.offset + data_of(bytes(data[info.offset : info.offset + info.length]))] ^= 1
    file.write_bytes(data)
    assert isinstance(failure(tmp_path, {"a": whole, "b": whole}), CorruptError)


@pytest.mark.parametrize("files", [1, 2])
def test_two_tensors_into_one_are_both_verified_and_the_last_one_stays(tmp_path: Path, files: int) -> None:
    """As when a model has learnt to tie its weights since."""
    state = {"a": torch.arange(100_000.0), "b": torch.ones(100_000)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=files == 1))
    assert len(list(tmp_path.glob("*.distcp"))) == files
    for _ in range(5):
        theirs, ours = torch.zeros(100_000), torch.zeros(100_000)
        dcp.load({"a": theirs, "b": theirs}, storage_reader=FileSystemReader(tmp_path))
        assert load(tmp_path, {"a": ours, "b": ours}).unverified_nbytes == 0
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [1, 10])
def test_targets_that_overlap_are_each_verified_and_the_last_one_stays(tmp_path: Path, rows: int) -> None:
    values = {"a": torch.arange(20.0).reshape(10, 2), "b": 100 + torch.arange(20.0).reshape(10, 2)}
    save_with("stock", values, tmp_path)

    def into() -> dict[str, Any]:
        memory = torch.zeros(15, 2)
        return {"a": memory[:10], "b": Parts.of((10, 2), {(0, 0): memory[5 : 5 + rows]}) if rows < 10 else memory[5:]}

    ours, theirs = into(), into()
    load(tmp_path, ours)
    dcp.load(theirs, checkpoint_id=tmp_path)
    assert torch.equal(ours["a"], theirs["a"])
    assert torch.equal(ours["a"][:5], values["a"][:5])


def test_under_another_default_device(tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4).t(), "n": 7, "late": torch.arange(5.0)}
    save_with("stock", state, tmp_path)
    found = {"w": torch.zeros(4, 3, dtype=torch.float64), "n": 0, "late": torch.zeros(10)[::2]}
    with torch.device("meta"):
        load(tmp_path, found)
    assert found["n"] == 7
    assert torch.equal(found["w"], state["w"].double())
    assert torch.equal(found["late"], state["late"])


def test_metadata_of_a_torch_without_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(12.0), "n": 7}
    save_with("stock", state, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        vars(info).pop("transform_descriptors", None)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    monkeypatch.delattr(_StorageInfo, "transform_descriptors", raising=False)
    found = blank(state)
    assert load(tmp_path, found).unverified_keys == ("n",)
    same(found, state)


def test_items_that_overlap_are_left_to_torch(tmp_path: Path, by_torch: list[str]) -> None:
    save_with("stock", {"w": torch.arange(1000.0), "n": 5}, tmp_path)

    def overlap(storage: dict[Any, Any]) -> None:
        infos = {index.fqn: info for index, info in storage.items()}
        infos["n"].offset, infos["n"].length = infos["w"].offset + 2000, 100

    change_places(tmp_path, overlap)
    got = []

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            got.append(len(value.read()))

    into = {"w": torch.zeros(1000), "n": 0}
    dcp.load(into, storage_reader=DataStatesStorageReader(tmp_path), planner=Planner())
    assert torch.equal(into["w"], torch.arange(1000.0))  # type: ignore[arg-type]
    assert got == [100]
    assert sorted(by_torch) == ["n", "w"]


def test_many_small_ones_are_verified(tmp_path: Path, by_torch: list[str]) -> None:
    state: dict[str, Any] = {f"t{i}": torch.full((1 + 7 * i,), float(i)) for i in range(300)}
    save_with("stock", state, tmp_path)
    into = blank(state)
    tally = load(tmp_path, into)
    same(into, state)
    assert tally.unverified_nbytes == 0
    assert tally.read_nbytes < os.path.getsize(tmp_path / "__0_0.distcp") + 4096
    assert by_torch == []


def test_every_kind_of_state(tmp_path: Path, by_torch: list[str]) -> None:
    state = every_kind()
    save_with("stock", state, tmp_path)
    same(loaded(tmp_path, state), state)
    assert by_torch == []


@pytest.mark.parametrize("dtype", [getattr(torch, d.name) for d in dtypes.ALL if "bits" not in d.name], ids=str)
def test_element_types(tmp_path: Path, dtype: torch.dtype, by_torch: list[str]) -> None:
    state = {"w": filled((70, 50), dtype), "one": filled((1,), dtype)}
    save_with("stock", state, tmp_path)
    into = blank(state)
    assert load(tmp_path, into).unverified_nbytes == 0
    same(into, state)
    assert by_torch == []


def test_into_other_types_and_strides(tmp_path: Path, by_torch: list[str]) -> None:
    small, large = torch.arange(12.0).reshape(3, 4), torch.arange(250_000.0).reshape(500, 500)
    save_with("stock", {"small": small, "large": large}, tmp_path)
    makers: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: torch.zeros_like(t, dtype=torch.float64),
        lambda t: torch.zeros_like(t.t()).t(),
        lambda t: torch.zeros(t.shape[0], 2 * t.shape[1])[:, ::2],
        lambda t: torch.nn.Parameter(torch.zeros_like(t)),
        lambda t: torch.zeros_like(t, dtype=torch.complex64).conj(),
    ]
    for make in makers:
        into = {"small": make(small), "large": make(large)}
        tally = load(tmp_path, into)
        assert torch.equal(into["small"].detach(), small.to(into["small"].dtype))
        assert torch.equal(into["large"].detach(), large.to(into["large"].dtype))
        assert tally.unverified_nbytes == 0
    assert by_torch == []


# what torch's own writer copies first, so that it fills its memory: another may not
@pytest.mark.parametrize("rows", [300, 3])
@pytest.mark.parametrize(
    ("change", "is_verified"),
    [
        (lambda t: t.t().contiguous().t(), True),
        (lambda t: torch.cat([t, t])[: len(t)], False),
        (lambda t: torch.cat([t, t])[len(t) :], False),
        (lambda t: torch.cat([t, t], 1)[:, : t.shape[1]], False),
        (lambda t: torch.nn.Parameter(t), True),
        (lambda t: t.clone().requires_grad_(), True),
    ],
)
def test_layouts(tmp_path: Path, by_torch: list[str], rows: int, change: Any, is_verified: bool) -> None:
    tensor = torch.arange(float(rows * 400)).reshape(rows, 400)
    save_with("stock", {"w": tensor}, tmp_path)
    rewrite(tmp_path, lambda _: archived(change(tensor)))
    into = {"w": torch.zeros_like(tensor)}
    tally = load(tmp_path, into)
    assert torch.equal(into["w"], tensor)
    assert tally.unverified_nbytes == (0 if is_verified else tally.needed_nbytes)
    part = Parts.of((rows, 400), {(1, 3): torch.zeros(2, 390)})
    load(tmp_path, {"w": part})
    assert torch.equal(part.boxes[1, 3], tensor[1:3, 3:393])
    assert by_torch == []


@pytest.mark.parametrize("columns", [300_000, 3])
def test_one_row_for_many(tmp_path: Path, by_torch: list[str], columns: int) -> None:
    expanded = torch.arange(float(columns)).expand(4, columns)
    save_with("stock", {"w": expanded}, tmp_path)
    rewrite(tmp_path, lambda _: archived(expanded))
    into = {"w": torch.zeros(4, columns)}
    tally = load(tmp_path, into)
    assert torch.equal(into["w"], expanded)
    assert tally.unverified_nbytes == 0
    assert by_torch == []


def test_without_checksums(tmp_path: Path, without_checksums: None, by_torch: list[str]) -> None:
    state = {"w": torch.arange(300_000.0), "v": torch.ones(3), "empty": torch.empty(0, 3)}
    save_with("stock", state, tmp_path)
    into = blank(state)
    tally = load(tmp_path, into)
    same(into, state)
    assert tally.unverified_nbytes == tally.needed_nbytes == 1_200_012
    assert tally.unverified_keys == ("v", "w")
    assert by_torch == []


def test_objects_are_read_with_the_rest(tmp_path: Path, by_torch: list[str]) -> None:
    state = {"w": torch.arange(10.0), "note": {"text": "x" * 3000}, "n": 5}
    save_with("stock", state, tmp_path)
    into = blank(state)
    tally = load(tmp_path, into)
    same(into, state)
    assert tally.unverified_keys == ("n", "note.text")
    assert by_torch == []


def test_several_ranks_and_files(tmp_path: Path, by_torch: list[str]) -> None:
    state: dict[str, Any] = {f"t{i}": torch.full((50_000,), float(i)) for i in range(8)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=False))
    assert len(list(tmp_path.glob("*.distcp"))) == 8
    into = blank(state)
    assert load(tmp_path, into).unverified_nbytes == 0
    same(into, state)
    assert by_torch == []


def test_alignment_of_ones_own(tmp_path: Path, by_torch: list[str]) -> None:
    from torch.utils.serialization import config

    before, config.save.storage_alignment = config.save.storage_alignment, 8192
    try:
        save_with("stock", {"w": torch.arange(1000.0)}, tmp_path)
    finally:
        config.save.storage_alignment = before
    into = {"w": torch.zeros(1000)}
    assert load(tmp_path, into).unverified_nbytes == 0
    assert torch.equal(into["w"], torch.arange(1000.0))
    assert by_torch == []


# --- what is damaged


@pytest.mark.parametrize("rows", [400_000, 30])
def test_a_flipped_byte_in_the_data_names_the_tensor(tmp_path: Path, rows: int) -> None:
    state = {"alpha": torch.arange(float(rows)), "beta": torch.arange(7.0)}
    save_with("stock", state, tmp_path)
    for name, tensor in state.items():
        info = places(tmp_path)[name]
        file = tmp_path / info.relative_path
        good = file.read_bytes()
        begin = info.offset + data_of(good[info.offset : info.offset + info.length])
        for at in (begin, begin + tensor.nbytes // 2, begin + tensor.nbytes - 1):
            file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            found = failure(tmp_path, state)
            assert isinstance(found, CorruptError)
            assert f"{name!r} in {file}" in str(found)
            assert (found.key, found.path) == (name, str(file))
        file.write_bytes(good)
    same(loaded(tmp_path, state), state)


FLIPPED = 5
"""Of the bytes around the data one in so many is flipped: all of them would take half a minute."""


def test_a_flipped_byte_anywhere_else_is_named_or_does_not_matter(tmp_path: Path) -> None:
    state = {"w": torch.arange(70_000.0)}
    save_with("stock", state, tmp_path)
    file = tmp_path / "__0_0.distcp"
    good = file.read_bytes()
    begin = data_of(good)
    named = 0
    for at in (*range(0, begin, FLIPPED), *range(begin + 280_000, len(good), FLIPPED)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        into = blank(state)
        try:
            load(tmp_path, into)
        except CheckpointException as error:
            ((found, _),) = error.failures.values()
            assert isinstance(found, FormatError), (at, found)
            assert f"'w' in {file}" in str(found), (at, found)
            named += 1
        else:
            same(into, state)
    assert named > 300 // FLIPPED


def test_a_part_is_not_read_from_another_place_when_its_frame_is_damaged(tmp_path: Path) -> None:
    whole = torch.arange(70_000.0).reshape(100, 700)
    save_with("stock", {"w": whole}, tmp_path)
    file = tmp_path / "__0_0.distcp"
    good = file.read_bytes()
    begin = data_of(good)
    for at in (*range(0, begin, FLIPPED), *range(begin + 280_000, len(good), FLIPPED)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        part = Parts.of((100, 700), {(50, 0): torch.zeros(50, 700)})
        try:
            load(tmp_path, {"w": part})
        except CheckpointException as error:
            ((found, _),) = error.failures.values()
            assert isinstance(found, FormatError), (at, found)
        else:
            assert torch.equal(part.boxes[50, 0], whole[50:]), at


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    save_with("stock", {"w": torch.arange(70_000.0)}, tmp_path)
    file = tmp_path / "__0_0.distcp"
    length = file.stat().st_size
    for cut in (length - 1, length - 500, length // 2, 100, 0):
        os.truncate(file, cut)
        found = failure(tmp_path, {"w": torch.zeros(70_000)})
        assert isinstance(found, FormatError)
        assert "'w'" in str(found)
        assert str(file) in str(found)
        assert "cut short" in str(found)


def test_a_stretch_that_was_never_written_is_named(tmp_path: Path) -> None:
    state = {"alpha": torch.arange(70_000.0), "beta": torch.arange(70_000.0)}
    save_with("stock", state, tmp_path)
    file = tmp_path / "__0_0.distcp"
    good, info = file.read_bytes(), places(tmp_path)["beta"]
    for begin, end in ((0, 4096), (info.length - 4096, info.length), (0, info.length)):
        begin, end = info.offset + begin, info.offset + end
        file.write_bytes(good[:begin] + bytes(end - begin) + good[end:])
        found = failure(tmp_path, state)
        assert isinstance(found, FormatError)
        assert f"'beta' in {file}" in str(found)


def test_damage_of_what_is_not_needed_does_not_matter(tmp_path: Path) -> None:
    state = {"alpha": torch.arange(70_000.0), "beta": torch.arange(50.0)}
    save_with("stock", state, tmp_path)
    file, info = tmp_path / "__0_0.distcp", places(tmp_path)["alpha"]
    data = file.read_bytes()
    file.write_bytes(data[: info.offset] + bytes(info.length) + data[info.offset + info.length :])
    same(loaded(tmp_path, {"beta": state["beta"]}), {"beta": state["beta"]})


# --- what lies


def central(archive: bytes, name: bytes) -> int:
    """Where the entry of a record begins in the central directory."""
    return archive.rindex(name) - 46


def lying(archive: bytes, at: int, form: str, *values: int) -> bytes:
    data = bytearray(archive)
    struct.pack_into(form, data, at, *values)
    return bytes(data)


HUGE = 1 << 31
LIES: dict[str, Callable[[bytes], bytes]] = {
    "a record longer than the file": lambda a: lying(a, central(a, b"archive/data/0") + 20, "<II", HUGE, HUGE),
    "a record that reaches into the directory": lambda a: lying(
        a, central(a, b"archive/data/0") + 20, "<II", 4000, 4000
    ),
    "a record shorter than its tensor": lambda a: lying(a, central(a, b"archive/data/0") + 20, "<II", 4, 4),
    "two lengths of one record": lambda a: lying(a, central(a, b"archive/data/0") + 20, "<II", 400, 404),
    "a record beyond the file": lambda a: lying(a, central(a, b"archive/data/0") + 42, "<I", HUGE),
    "a record that is another": lambda a: lying(a, central(a, b"archive/data/0") + 42, "<I", 0),
    "a header that never ends": lambda a: lying(a, records(a)["archive/data/0"].header_offset + 28, "<H", 0xFFFF),
    "a pickle longer than the file": lambda a: lying(a, central(a, b"archive/data.pkl") + 20, "<II", HUGE, HUGE),
    "a directory beyond the file": lambda a: lying(a, len(a) - 98 + 48, "<Q", 1 << 63),
    "a directory longer than the file": lambda a: lying(a, len(a) - 98 + 40, "<Q", 1 << 63),
    "more records than there are": lambda a: lying(a, len(a) - 98 + 32, "<Q", 1 << 63),
    "fewer records than there are": lambda a: lying(a, len(a) - 98 + 32, "<Q", 3),
    "an end beyond the file": lambda a: lying(a, len(a) - 22 - 12, "<Q", 1 << 63),
    "names that never end": lambda a: lying(a, central(a, b"archive/data/0") + 28, "<HHH", 0xFFFF, 0xFFFF, 0xFFFF),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_found(tmp_path: Path, lie: str) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, LIES[lie])
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, FormatError)
    assert "'w' in " in str(found)


def repickled(archive: bytes, old: bytes, new: bytes) -> bytes:
    """The same archive with another pickle of the same length, and the checksum of that."""
    info, at = records(archive)["archive/data.pkl"], data_of(archive, "archive/data.pkl")
    changed = archive[at : at + info.file_size].replace(old, new)
    assert len(changed) == info.file_size
    assert changed != archive[at : at + info.file_size]
    made = bytearray(archive)
    made[at : at + info.file_size] = changed
    struct.pack_into("<I", made, at + info.file_size + 4, zlib.crc32(changed))
    struct.pack_into("<I", made, central(archive, b"archive/data.pkl") + 16, zlib.crc32(changed))
    return bytes(made)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x64\x85", b"K\xff\x85"),  # a longer shape than the storage holds
        (b"K\x01\x85", b"K\x09\x85"),  # strides that reach beyond it
        (b"K\x00K\x64", b"K\x50K\x64"),  # a first element near its end
        (b"K\x64tq", b"K\xfftq"),  # a longer storage than the record
    ],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, lambda archive: repickled(archive, old, new))
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, FormatError)
    assert "'w' in " in str(found)


class Harm:
    def __reduce__(self) -> Any:
        return (exec, ("import sys; sys.modules['harm'] = sys",))


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, lambda _: archived(Harm()))
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, FormatError)
    assert "'w' in " in str(found)
    assert "harm" not in sys.modules


# --- what is left to torch


def repacked(archive: bytes, **changed: bytes) -> bytes:
    """The same records as another writer of zip files writes them, some of other contents."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            target.writestr(name, changed.get(name.removeprefix("archive/"), source.read(name)))
    return made.getvalue()


def compressed(archive: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name), zipfile.ZIP_DEFLATED)
    return made.getvalue()


def legacy(tensor: torch.Tensor) -> bytes:
    made = io.BytesIO()
    torch.save(tensor, made, _use_new_zipfile_serialization=False)
    return made.getvalue()


CONJUGATE = torch.complex(torch.arange(100.0), torch.arange(100.0)).conj()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda a: repacked(a, byteorder=b"big"), torch.arange(100.0)),
        (lambda a: compressed(a), torch.arange(100.0)),
        (lambda a: legacy(torch.arange(100.0)), torch.arange(100.0)),
        (lambda a: archived(CONJUGATE), CONJUGATE),
        (lambda a: archived(torch.arange(100.0).to_sparse()), None),
    ],
    ids=["big endian", "compressed", "legacy", "conjugate", "sparse"],
)
def test_what_is_not_known_is_left_to_torch(
    tmp_path: Path, by_torch: list[str], change: Any, expected: torch.Tensor | None
) -> None:
    save_with("stock", {"v": torch.ones(5), "w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, change)
    dtype = torch.float32 if expected is None else expected.dtype
    theirs, ours = ({"v": torch.zeros(5), "w": torch.zeros(100, dtype=dtype)} for _ in range(2))
    failed: list[bool] = []
    for into, reader in ((theirs, FileSystemReader(tmp_path)), (ours, DataStatesStorageReader(tmp_path))):
        del by_torch[:]
        try:
            dcp.load(into, storage_reader=reader)
            failed.append(False)
        except CheckpointException:
            failed.append(True)
    assert failed[0] == failed[1]
    assert by_torch == ["w"]
    same(ours, theirs)


def test_an_archive_of_another_writer_of_zip_files(tmp_path: Path, by_torch: list[str]) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, repacked)
    into = {"w": torch.zeros(100)}
    assert load(tmp_path, into).unverified_nbytes == 0
    assert torch.equal(into["w"], torch.arange(100.0))
    assert by_torch == []


def test_an_archive_with_numbers_of_64_bits(tmp_path: Path, by_torch: list[str]) -> None:
    """As torch writes them from 4 GiB on; this package's own have them in any case."""
    save_with("ours", {"w": torch.arange(100.0)}, tmp_path / "ours")
    info = places(tmp_path / "ours")["w"]
    archive = (tmp_path / "ours" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    save_with("stock", {"w": torch.zeros(100)}, tmp_path / "stock")
    rewrite(tmp_path / "stock", lambda _: archive)
    into = {"w": torch.zeros(100)}
    assert load(tmp_path / "stock", into).unverified_nbytes == 0
    assert torch.equal(into["w"], torch.arange(100.0))
    assert by_torch == []


def test_a_shape_other_than_planned_is_torchs_to_refuse(tmp_path: Path, by_torch: list[str]) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, lambda _: archived(torch.arange(50.0)))
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, FormatError)
    assert "'w' in " in str(found)
    assert by_torch == ["w"]


class Inverted(StreamTransformExtension):
    """Stores every byte inverted."""

    @staticmethod
    def registry_name() -> str:
        return "tests.inverted"

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        del version
        return Inverted()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.BytesIO):
            def close(self) -> None:
                output.write(self.getvalue().translate(_INVERT))
                output.close()
                super().close()

        return Writer()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(input.read(-1).translate(_INVERT))


_INVERT = bytes(255 - n for n in range(256))


def test_what_an_extension_has_written_is_left_to_torch(tmp_path: Path, by_torch: list[str]) -> None:
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    state = {"w": torch.arange(100.0), "n": 5}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Inverted()]))
    reader = DataStatesStorageReader(tmp_path)
    registry = ExtensionRegistry()
    registry.extensions[Inverted.registry_name()] = Inverted
    reader.transforms.extension_registry = registry
    into = blank(state)
    dcp.load(into, storage_reader=reader)
    same(into, state)
    assert sorted(by_torch) == ["n", "w"]


def test_safetensors_fails_as_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    format_ = SerializationFormat.SAFETENSORS
    dcp.save({"w": torch.ones(5)}, storage_writer=dcp.FileSystemWriter(tmp_path, serialization_format=format_))
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(5)}, storage_reader=FileSystemReader(tmp_path))
    assert isinstance(failure(tmp_path, {"w": torch.zeros(5)}), DatastatesError)


def test_a_target_of_another_shape_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    wrong = functools.partial(torch.zeros, 7)
    monkeypatch.setattr(dcp.DefaultLoadPlanner, "resolve_tensor", lambda *_: wrong())
    found = failure(tmp_path, {"w": torch.zeros(100)})
    assert isinstance(found, ValueError)
    assert "'w'" in str(found)
