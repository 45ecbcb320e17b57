"""A part of one tensor out of a checkpoint, read and verified without the rest."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore
from safetensors.torch import safe_open, save_file

import datastates as ds
from datastates._base.sizes import CHUNK
from datastates.container.file import open_container
from datastates.errors import ClosedError, CorruptError, DatastatesError
from datastates.providers import from_state_dict
from datastates.reading.checkpoint import Checkpoint
from datastates.state.index import indexed, nth
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Buffer, Shard
from datastates.storage import Location, register, stores

SMALL: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}
BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32)
TENSORS = {
    "cube": BASE.reshape(6, 4, 5).clone(),
    "transposed": BASE.reshape(10, 12).clone().t(),
    "columns": BASE.reshape(6, 20).clone()[:, 3:9],
    "half": BASE.to(torch.bfloat16).reshape(15, 8),
    "complex": torch.complex(BASE, -BASE).reshape(4, 30),
    "bits": torch.arange(64).reshape(8, 8) % 3 == 0,
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
}
WHOLE = np.arange(700 * 3000, dtype=np.float64).reshape(700, 3000)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run"
    ds.snapshot([from_state_dict("model", TENSORS)], path, **SMALL).wait_committed()
    return path


@pytest.fixture(scope="module")
def opened(saved: Path) -> Checkpoint:
    return ds.open(saved, **SMALL)


@st.composite
def indices(draw: st.DrawFn) -> tuple[str, Any]:
    key = draw(st.sampled_from(sorted(TENSORS)))
    index: list[Any] = []
    for n in TENSORS[key].shape[: draw(st.integers(0, 3))]:
        bounds = st.none() | st.integers(-n - 2, n + 2)
        slices = st.builds(slice, bounds, bounds, st.sampled_from([None, 1]))
        index.append(draw(st.integers(-n, n - 1) | slices if n else slices))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(index)))
        rest = TENSORS[key].ndim - len(index)
        index[at:at] = [...] if at == len(index) or rest == 0 else []
    return key, index[0] if len(index) == 1 and draw(st.booleans()) else tuple(index)


@given(indices())
def test_a_part_is_what_the_index_chooses(opened: Checkpoint, asked: tuple[str, Any]) -> None:
    key, index = asked
    expected, found = TENSORS[key][index], opened.part(f"model/{key}", index)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.is_contiguous()
    assert torch.equal(found, expected)


def test_integers_may_be_of_numpy_and_torch(opened: Checkpoint) -> None:
    expected = TENSORS["cube"][2, 1:3]
    assert torch.equal(opened.part("model/cube", (np.int64(2), slice(np.int32(1), 3))), expected)
    assert torch.equal(opened.part("model/cube", (torch.tensor(2), slice(torch.tensor(1), 3))), expected)


@pytest.mark.parametrize(
    ("index", "kind", "said"),
    [
        (6, IndexError, "index 6 is out of range for 6 elements in dimension 0"),
        ((0, -5), IndexError, "index -5 is out of range for 4 elements in dimension 1"),
        ((0, 0, 0, 0), IndexError, "4 indices for an array of 3 dimensions"),
        ((..., 0, ...), IndexError, r"at most one \.\.\."),
        (slice(None, None, 2), ValueError, "step 2 in dimension 0"),
        (slice(None, None, -1), ValueError, "step -1 in dimension 0"),
        (None, TypeError, "not of NoneType"),
        (True, TypeError, "not of bool"),
        (1.0, TypeError, "not of float"),
        ([1, 2], TypeError, "not of list"),
        (torch.tensor(True), TypeError, "not of Tensor"),
        (np.True_, TypeError, "not of bool"),
        (np.array([1]), TypeError, "not of ndarray"),
        (torch.tensor([1]), TypeError, "not of Tensor"),
    ],
)
def test_what_is_no_part_is_refused_by_name(opened: Checkpoint, index: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=rf"'model/cube' of shape \(6, 4, 5\): .*{said}"):
        opened.part("model/cube", index)


def test_a_key_that_is_not_there_is_said_so(opened: Checkpoint) -> None:
    for ask in (opened.shape, opened.dtype, lambda key: opened.part(key, 0), lambda key: opened.shard(key, 0, 0, 1)):
        for key in ("model/nothing", 3):
            with pytest.raises(KeyError) as caught:
                ask(key)  # type: ignore[arg-type]
            assert caught.value.args == (key,)


def test_shape_and_type_are_told_without_reading(opened: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastates.container.file.Container.read_row", lambda *_: pytest.fail("read"))
    for key, tensor in TENSORS.items():
        assert opened.shape(f"model/{key}") == tuple(tensor.shape)
        assert opened.dtype(f"model/{key}") == str(tensor.dtype).removeprefix("torch.")


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_a_shard_is_a_chunk_of_torchs(opened: Checkpoint, dim: int) -> None:
    for world_size in (n for n in range(1, 7) if TENSORS["cube"].shape[dim] % n == 0):
        for rank, expected in enumerate(TENSORS["cube"].chunk(world_size, dim)):
            assert torch.equal(opened.shard("model/cube", dim, rank, world_size), expected)


@pytest.mark.parametrize(
    ("dim", "rank", "world_size", "kind", "said"),
    [
        (0, 0, 4, ValueError, "6 elements in dimension 0 do not divide by 4"),
        (0, 3, 3, ValueError, "rank 3 is not one of 3"),
        (0, -1, 3, ValueError, "rank -1 is not one of 3"),
        (3, 0, 1, IndexError, "dimension 3 of an array of 3 dimensions"),
        (-4, 0, 1, IndexError, "dimension -4 of an array of 3 dimensions"),
        (0.5, 0, 1, TypeError, "'float' object cannot be interpreted as an integer"),
    ],
)
def test_a_shard_that_is_none_is_refused_by_name(
    opened: Checkpoint, dim: int, rank: int, world_size: int, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=f"'model/cube': {said}"):
        opened.shard("model/cube", dim, rank, world_size)


class Stretch(StateProvider):
    """A rank's part of a matrix: a box or a range of it."""

    def __init__(self, part: Any, place: dict[str, Any]) -> None:
        super().__init__("part")
        self.part, self.place = np.ascontiguousarray(part), place

    def shards(self) -> list[Shard]:
        buffer = Buffer(self.part.ctypes.data, self.part.nbytes, owner=self.part)
        shape = self.part.shape
        stride = tuple(s // 8 for s in self.part.strides)
        common: dict[str, Any] = {"dtype": "float64", "kind": "numpy", "global_shape": WHOLE.shape, "buffer": buffer}
        return [Shard("w", shape=shape, stride=stride, **self.place, **common)]

    def destinations(self, saved: Saved) -> list[Shard]:
        return []


def of_ranks(path: Path, parts: Sequence[Stretch]) -> Path:
    """Save a checkpoint whose ranks have these parts."""
    with ThreadPoolExecutor(len(parts)) as pool:
        saves = pool.map(
            lambda rank: ds.snapshot([parts[rank]], path, rank=rank, world_size=len(parts), **SMALL), range(len(parts))
        )
        for save in list(saves):
            save.wait_committed()
    return path


def rows(ranks: int) -> list[Stretch]:
    cuts = [700 * i // ranks for i in range(ranks + 1)]
    return [Stretch(WHOLE[a:b], {"offset": (a, 0), "flat": None}) for a, b in itertools.pairwise(cuts)]


def columns(ranks: int) -> list[Stretch]:
    cuts = [3000 * i // ranks for i in range(ranks + 1)]
    return [Stretch(WHOLE[:, a:b], {"offset": (0, a), "flat": None}) for a, b in itertools.pairwise(cuts)]


def ranges(ranks: int) -> list[Stretch]:
    cuts = [WHOLE.size * i // ranks + 7 * (0 < i < ranks) for i in range(ranks + 1)]
    return [Stretch(WHOLE.ravel()[a:b], {"offset": None, "flat": (a, b)}) for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("cut", [rows, columns, ranges])
@pytest.mark.parametrize("ranks", [1, 3])
def test_parts_come_from_those_of_ranks(cut: Any, ranks: int, tmp_path: Path) -> None:
    with ds.open(of_ranks(tmp_path / "c", cut(ranks)), **SMALL) as checkpoint:
        for index in [(slice(200, 240),), (slice(None), slice(900, 1100)), (slice(230, 240), slice(0, 7)), (699, 2999)]:
            assert (checkpoint.part("part/w", index) == WHOLE[index]).all()
        assert (checkpoint.shard("part/w", 1, 2, 4) == np.split(WHOLE, 4, 1)[2]).all()


def test_containers_without_an_element_of_it_may_be_missing(tmp_path: Path) -> None:
    (of_ranks(tmp_path / "c", rows(7)) / "rank-00003.pt").unlink()
    with ds.open(tmp_path / "c", **SMALL) as checkpoint:
        for begin in (0, 400):
            assert (checkpoint.part("part/w", slice(begin, begin + 300)) == WHOLE[begin : begin + 300]).all()
        with pytest.raises(DatastatesError, match=r"'part/w' cannot be read .*rank-00003\.pt is missing"):
            checkpoint.part("part/w", slice(399, 401))


def test_a_container_alone_has_its_own_parts(tmp_path: Path) -> None:
    with ds.open(of_ranks(tmp_path / "c", rows(7)) / "rank-00003.pt", **SMALL) as container:
        assert (container.part("part/w", slice(300, 400)) == WHOLE[300:400]).all()
        with pytest.raises(DatastatesError, match=r"'part/w' .*only a part .*\(700, 3000\)"):
            container.part("part/w", slice(299, 400))


class Counted(MemoryStore):
    """Counts the bytes that are read."""

    nbytes = 0

    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        self.nbytes += nbytes
        return super().read(path, offset, nbytes)


def test_rows_take_their_chunks_only(tmp_path: Path) -> None:
    path = of_ranks(tmp_path / "c", rows(1))
    store = Counted()
    for file in path.iterdir():
        store.create(Location("mem://bucket/c") / file.name, file.read_bytes())
    register("mem", store)
    try:
        with ds.open("mem://bucket/c", **SMALL) as checkpoint:
            checkpoint.shape("part/w")
            for wanted in (slice(0, 1), slice(100, 140), slice(17, 670)):
                store.nbytes = 0
                assert (checkpoint.part("part/w", wanted) == WHOLE[wanted]).all()
                assert store.nbytes <= WHOLE[wanted].nbytes + 2 * CHUNK
            assert store.nbytes <= 1.05 * WHOLE[wanted].nbytes
    finally:
        del stores.KINDS["mem"]


@pytest.mark.parametrize("wanted", [(0,), (slice(80, 120),), (slice(None), slice(5, 9))], ids=str)
def test_damage_is_found_in_the_chunks_that_it_takes(wanted: Any, tmp_path: Path) -> None:
    file = of_ranks(tmp_path / "c", rows(1)) / "rank-00000.pt"
    begin = int(open_container(Location(file)).index.records.data_offset[0])
    for row in (0, 119, 699):
        good = file.read_bytes()
        with builtins.open(file, "r+b") as raw:
            raw.seek(begin + (row + 1) * WHOLE[0].nbytes - 8)  # no wanted element, but its chunk
            raw.write(bytes([good[begin + (row + 1) * WHOLE[0].nbytes - 8] ^ 1]))
        with ds.open(file, **SMALL) as checkpoint:
            touched = np.unique(np.arange(WHOLE.size).reshape(WHOLE.shape)[wanted] * 8 // CHUNK)
            if ((row + 1) * WHOLE[0].nbytes - 8) // CHUNK in touched:
                with pytest.raises(CorruptError, match="part/w"):
                    checkpoint.part("part/w", wanted)
            else:
                assert (checkpoint.part("part/w", wanted) == WHOLE[wanted]).all()
        file.write_bytes(good)


def test_a_file_of_torch_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datastates.reading import new_part

    verified: list[str] = []
    check = new_part.check_record
    monkeypatch.setattr(new_part, "check_record", lambda *a: (verified.append(a[2]), check(*a))[1])
    torch.save({"a": BASE, "b": TENSORS["cube"]}, tmp_path / "m.pt")
    with ds.open(tmp_path / "m.pt", **SMALL) as checkpoint:
        for _ in range(3):
            assert torch.equal(checkpoint.part("b", (slice(2, 4), 1)), TENSORS["cube"][2:4, 1])
        assert verified == ["b"]
    data = bytearray((tmp_path / "m.pt").read_bytes())
    data[data.find(BASE[50:70].numpy().tobytes()) + 3] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    with ds.open(tmp_path / "m.pt", **SMALL) as checkpoint, pytest.raises(CorruptError, match="'a'"):
        checkpoint.part("a", slice(100, 103))


def test_it_is_as_safe_open_gives_it(tmp_path: Path) -> None:
    plain = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(plain, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as stock, ds.open(tmp_path / "m.safetensors", **SMALL) as ours:
        for key in ("cube", "half", "complex"):
            for index in [slice(1, 3), (slice(None), slice(2, 4)), (slice(0, 0),), (slice(-3, None), slice(1, -1))]:
                assert torch.equal(ours.part(key, index), stock.get_slice(key)[index])
            assert list(ours.shape(key)) == stock.get_slice(key).get_shape()


def test_a_closed_checkpoint_gives_no_parts(saved: Path) -> None:
    checkpoint = ds.open(saved, **SMALL)
    checkpoint.close()
    with pytest.raises(ClosedError, match="model/cube"):
        checkpoint.part("model/cube", 0)


def test_parts_come_as_numpys_if_asked(saved: Path) -> None:
    with ds.open(saved, framework="np", **SMALL) as checkpoint:
        found = checkpoint.part("model/cube", (1, ..., 2))
        assert type(found) is np.ndarray
        assert (found == TENSORS["cube"][1, ..., 2].numpy()).all()


def test_indices_are_as_numpys() -> None:
    array = np.zeros((3, 4, 5))
    for index in [(), ..., 0, (..., 0), (0, ...), (slice(1, 9), ..., -1), (slice(2, 1),), (1, 2, 3)]:
        found = indexed(index, array.shape)
        box = tuple(slice(b, b + n) for b, n in zip(found.begin, found.size, strict=True))
        assert array[box].shape == found.size
        assert array[index].shape == found.shape
    assert array[nth(array.shape, -2, 1, 2)].shape == (3, 2, 5)
