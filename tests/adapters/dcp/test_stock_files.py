"""Files of torch's own writer are read in ranges, and verified where they can be."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stock import archived, change_places, data_of, load, places, repacked, rewrite
from torch.distributed.checkpoint.filesystem import FileSystemReader

from datastates.errors import CorruptError
from datastates.state import dtypes
from states import Parts, blank, every_kind, failure, filled, loaded, same, save_with

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
MIB = 1 << 20


@pytest.fixture
def without_checksums() -> Iterator[None]:
    """Torch computes no checksums."""
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


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
        assert tally.read_nbytes - tally.shared_nbytes <= 2 * tally.needed_nbytes
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
    """As when a model ties weights that were not tied when it was saved."""
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


def test_metadata_of_a_torch_without_extensions(tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0), "n": 7}
    save_with("stock", state, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        vars(info).pop("transform_descriptors", None)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = blank(state)
    assert load(tmp_path, found).unverified_keys == ("n",)
    same(found, state)


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


TYPES = [getattr(torch, d.name) for d in dtypes.ALL if d.in_torch and "bits" not in d.name]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
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


# torch's own writer first copies such tensors, so that they fill their storage; another writer may not
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


def test_an_archive_of_another_writer_of_zip_files(tmp_path: Path, by_torch: list[str]) -> None:
    save_with("stock", {"w": torch.arange(100.0)}, tmp_path)
    rewrite(tmp_path, repacked)
    into = {"w": torch.zeros(100)}
    assert load(tmp_path, into).unverified_nbytes == 0
    assert torch.equal(into["w"], torch.arange(100.0))
    assert by_torch == []


def test_an_archive_with_numbers_of_64_bits(tmp_path: Path, by_torch: list[str]) -> None:
    """Torch writes such numbers from 4 GiB on. This package's files always have them."""
    save_with("ours", {"w": torch.arange(100.0)}, tmp_path / "ours")
    info = places(tmp_path / "ours")["w"]
    archive = (tmp_path / "ours" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    save_with("stock", {"w": torch.zeros(100)}, tmp_path / "stock")
    rewrite(tmp_path / "stock", lambda _: archive)
    into = {"w": torch.zeros(100)}
    assert load(tmp_path / "stock", into).unverified_nbytes == 0
    assert torch.equal(into["w"], torch.arange(100.0))
    assert by_torch == []
