"""Checkpoints of several ranks, read without providers: array by array, as a whole, and each container by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_state import LAYOUTS, SHAPES, SMALL, save
from split_state import Split, logical

import datastates as ds
from datastates.commit import catalog
from datastates.container.file import open_container, read_index
from datastates.errors import CommitError, CorruptError, DatastatesError, StorageError
from datastates.providers import PickledObjectProvider, ReplicatedProvider, RngProvider, from_state_dict
from datastates.state.arrays import array_shard, shards_of
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Buffer, Shard
from datastates.storage import Location
from datastates.testing import equal

LARGE = {"w": (2048, 1024), "b": (33,)}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 32
    file.write_bytes(data)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shapes", [SHAPES, LARGE])
def test_every_array_is_put_together_from_its_parts(
    threads: Any, tmp_path: Path, layout: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    save(threads, tmp_path / "run" / "step-00000003", layout, 3, shapes=shapes)
    with ds.open(tmp_path / "run", **SMALL) as checkpoint:
        assert checkpoint.step == 3
        for key, shape in shapes.items():
            found = checkpoint[f"model/{key}"]
            expected = logical(key, shape, step=3)
            assert (found.dtype, found.shape) == (expected.dtype, shape)
            assert found.tobytes() == expected.tobytes()
            digest = checkpoint.digest(f"model/{key}")
            assert digest in (f"{zlib.crc32(expected.tobytes()):08x}", None)
            assert digest or layout in ("columns", "grid", "mixed")
        assert set(checkpoint) == {f"model/{key}" for key in shapes}
        assert len(checkpoint) == len(shapes)
        for absent in ("model", "loop", "own", "own@00001", "model/", "model/x", ""):
            assert absent not in checkpoint
            with pytest.raises(KeyError):
                checkpoint[absent]
            with pytest.raises(KeyError):
                checkpoint.digest(absent)
    loaded = ds.load(tmp_path / "run", **SMALL)
    assert {key: value.tobytes() for key, value in loaded.pop("model").items()} == {
        key: logical(key, shape, step=3).tobytes() for key, shape in shapes.items()
    }
    assert loaded == {"loop": {"rank": 0}, **{f"own@{rank:05d}": {"rank": rank} for rank in range(3)}}


def test_an_array_is_read_without_opening_the_containers_of_others(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    save(threads, path, "ranges", 8)  # the last ranks hold "b" and what follows
    opened: list[str] = []

    def opening(path: Location, expected: int) -> Any:
        opened.append(path.name)
        return read_index(path, expected)

    monkeypatch.setattr("datastates.container.file.read_index", opening)
    with ds.open(path, **SMALL) as checkpoint:
        assert "model/w" in checkpoint
        assert opened == []
        assert checkpoint["model/one"] == logical("one", (1, 1), step=3)
        assert opened == ["rank-00007.pt"]


def test_containers_are_opened_several_at_a_time(threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(threads, tmp_path / "c", "ranges", 4)
    together = threading.Barrier(4, timeout=60)

    def opening(path: Location, expected: int) -> Any:
        together.wait()  # raises unless four containers are being opened
        return read_index(path, expected)

    monkeypatch.setattr("datastates.container.file.read_index", opening)
    with ds.open(tmp_path / "c", **SMALL) as checkpoint:
        assert len(list(checkpoint)) == len(checkpoint)


def of_two_ranks(threads: Any, path: Path) -> torch.Tensor:
    """Save a tensor that both ranks have, which rank 0 writes, and that it has under two names."""
    weight = torch.arange(8.0)

    def one(rank: int) -> None:
        both = ReplicatedProvider(from_state_dict("both", {"a": weight}), [0, 1])
        own = from_state_dict("own" if rank else "tied", {"b": torch.ones(2) if rank else weight})
        ds.snapshot([both, own], path, rank=rank, world_size=2, **SMALL).wait_committed()

    threads(2, one)
    return weight


def test_tensors_that_are_tied_across_providers_stay_tied(threads: Any, tmp_path: Path) -> None:
    weight = of_two_ranks(threads, tmp_path / "c")
    loaded = ds.load(tmp_path / "c", **SMALL)
    assert loaded["both"]["a"] is loaded["tied"]["b"]
    assert torch.equal(loaded["both"]["a"], weight)


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_container_that_is_not_needed_is_not_opened(threads: Any, tmp_path: Path, damaged: int) -> None:
    weight, live = torch.arange(8.0), torch.zeros(8)
    saved, own = (
        ReplicatedProvider(from_state_dict("both", {"a": value}), ranks)
        for value, ranks in ((weight, [0, 1]), (live, [0]))
    )
    # rank 0 writes it
    threads(2, lambda rank: ds.snapshot([saved], tmp_path / "c", rank=rank, world_size=2, **SMALL).wait_committed())
    file = tmp_path / "c" / f"rank-{damaged:05d}.pt"
    os.truncate(file, file.stat().st_size - 50)
    threads(1, lambda _: ds.restore([own], tmp_path / "c", **SMALL))
    assert torch.equal(live, weight) == (damaged == 1)


@pytest.mark.by_hand
def test_containers_are_opened_while_the_interpreter_ends(threads: Any, tmp_path: Path) -> None:
    of_two_ranks(threads, tmp_path / "c")
    # Python itself refuses to import torch for the first time while it ends
    load = "atexit.register(lambda: print(sorted(datastates.load(sys.argv[1]))))"
    script = f"import atexit, sys, torch, datastates; {load}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "c")], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert (done.stdout, done.returncode) == ("['both', 'own', 'tied']\n", 0), done.stderr


def test_a_missing_container_is_named_where_it_is_needed(threads: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(threads, path, "ranges", 4)
    (path / "rank-00002.pt").unlink()
    with ds.open(path, **SMALL) as checkpoint:
        assert checkpoint["model/one"] == logical("one", (1, 1), step=3)
        assert "model/w" in checkpoint
        with pytest.raises(DatastatesError, match=r"'model/w' cannot be read from .*: rank-00002\.pt is missing"):
            checkpoint["model/w"]
        for look in (list, len):
            with pytest.raises(StorageError, match=r"rank-00002\.pt"):
                look(checkpoint)
    with pytest.raises(StorageError, match=r"rank-00002\.pt"):
        ds.load(path, **SMALL)


@pytest.mark.parametrize("damage", [Path.unlink, partial(flip, at=0)], ids=["lost", "damaged"])
def test_load_needs_no_catalog(threads: Any, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """It takes the containers from the manifest, and what each holds from its index."""
    save(threads, tmp_path / "c", "rows", 2)
    whole = ds.load(tmp_path / "c", **SMALL)
    damage(tmp_path / "c" / catalog.FILE)
    assert equal(ds.load(tmp_path / "c", **SMALL), whole)
    with ds.open(tmp_path / "c", **SMALL) as checkpoint, pytest.raises(DatastatesError, match=catalog.FILE):
        checkpoint["model/w"]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_container_is_read_by_itself(threads: Any, tmp_path: Path, rank: int) -> None:
    save(threads, tmp_path / "c", "rows", 2)
    file = tmp_path / "c" / f"rank-{rank:05d}.pt"
    model = Split.rows("model", SHAPES, rank, 2).fill(3)
    loaded, by_torch = ds.load(file, **SMALL), torch.load(file, weights_only=True)
    assert loaded["loop"] == by_torch["loop"] == loaded[f"own@{rank:05d}"] == {"rank": rank}
    for key, array in model.arrays.items():
        if key != "scalar":  # only one of the ranks that hold it writes it
            assert loaded["model"][key].tobytes() == by_torch["model"][key].numpy().tobytes() == array.tobytes()
    with ds.open(file, **SMALL) as checkpoint:
        assert checkpoint.step == 3
        assert set(checkpoint) == {f"model/{key}" for key in SHAPES}
        with pytest.raises(DatastatesError, match=r"'model/w' cannot be read .* only a part of .* \(96, 40\)"):
            checkpoint["model/w"]
        assert checkpoint.digest("model/w") is None


class Tied(StateProvider):
    """Two tensors, a row or a column of matrices on each rank. Ranks have one memory for both, unless ``other``."""

    def __init__(self, rank: int, other: float | None, axis: int = 0) -> None:
        super().__init__("tied")
        self.offset = (rank, 0) if axis == 0 else (0, 4 * rank)
        self.shape, part = ((2, 4), (1, 4)) if axis == 0 else ((2, 8), (2, 4))
        self.a = np.full(part, rank, np.float32)
        self.b = self.a if rank == 0 or other is None else np.full(part, other, np.float32)

    def shards(self) -> list[Shard]:
        arrays = {"a": self.a, "b": self.b}
        return [array_shard(k, v, global_shape=self.shape, offset=self.offset) for k, v in arrays.items()]

    def destinations(self, saved: Saved) -> list[Shard]:
        return []


def test_load_refuses_tensors_that_are_the_same_memory_on_one_rank_only(threads: Any, tmp_path: Path) -> None:
    def save_tied(rank: int, other: float) -> None:
        ds.snapshot([Tied(rank, other)], tmp_path / f"{other}", **SMALL).wait_committed()

    assert threads(2, partial(save_tied, other=1)) == threads(2, partial(save_tied, other=7)) == [None, None]
    rows = ds.load(tmp_path / "1", **SMALL)["tied"]
    assert [rows[key].tolist() for key in "ab"] == [[[0.0] * 4, [1.0] * 4]] * 2
    with pytest.raises(DatastatesError, match=r"'tied/a' and 'tied/b' share memory in .*rank-00000\.pt, but"):
        ds.load(tmp_path / "7", **SMALL)
    with ds.open(tmp_path / "7", **SMALL) as checkpoint:
        assert checkpoint["tied/a"].tolist() == [[0.0] * 4, [1.0] * 4]
        assert checkpoint["tied/b"].tolist() == [[0.0] * 4, [7.0] * 4]


def test_load_ties_what_is_tied_on_all_ranks_however_it_is_cut(threads: Any, tmp_path: Path) -> None:
    """Of columns no digest is known, so only ties tell that two tensors are one."""

    def save_tied(rank: int, other: float | None) -> None:
        ds.snapshot([Tied(rank, other, axis=1)], tmp_path / f"{other}", **SMALL).wait_committed()

    assert threads(2, partial(save_tied, other=None)) == threads(2, partial(save_tied, other=7)) == [None, None]
    columns = ds.load(tmp_path / "None", **SMALL)["tied"]
    assert columns["a"].tolist() == columns["b"].tolist() == [[0.0] * 4 + [1.0] * 4] * 2
    with pytest.raises(DatastatesError, match=r"'tied/a' and 'tied/b' share memory in .*rank-00000\.pt, but"):
        ds.load(tmp_path / "7", **SMALL)
    with ds.open(tmp_path / "7", **SMALL) as checkpoint:
        assert checkpoint["tied/a"].tolist() == [[0.0] * 4 + [1.0] * 4] * 2
        assert checkpoint["tied/b"].tolist() == [[0.0] * 4 + [7.0] * 4] * 2


class InOneStorage(StateProvider):
    """Two tensors on rank 0, and perhaps a row of a third one, in one storage; rank 1 has the other row."""

    def __init__(self, rank: int, keys: str) -> None:
        super().__init__("own")
        self.rank, self.keys = rank, keys

    def shards(self) -> list[Shard]:
        storage = torch.arange(12.0)
        views = dict(zip("abc", storage.view(3, 1, 4), strict=True))
        keys = [key for key in self.keys if self.rank == 0 or key == "c"]
        shards = shards_of(keys, [views[key] for key in keys], [False] * len(keys))
        part = {"global_shape": (2, 4), "offset": (self.rank, 0)}
        return [replace(shard, **part) if shard.key == "c" else shard for shard in shards]

    def destinations(self, saved: Saved) -> list[Shard]:
        return []


@pytest.mark.parametrize(("keys", "together"), [("ab", True), ("abc", False)])
def test_tensors_of_one_storage_share_it_unless_it_has_parts_of_others(
    threads: Any, tmp_path: Path, keys: str, together: bool
) -> None:
    def one(rank: int) -> None:
        ds.snapshot([InOneStorage(rank, keys)], tmp_path / "c", **SMALL).wait_committed()

    assert threads(2, one) == [None, None]
    loaded = ds.load(tmp_path / "c", **SMALL)["own"]
    assert [loaded[key].tolist() for key in "ab"] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [loaded[key].untyped_storage().nbytes() for key in "ab"] == ([32, 32] if together else [16, 16])
    if not together:
        assert loaded["c"].tolist() == [[8, 9, 10, 11]] * 2


class Repeated(StateProvider):
    """A tensor of two equal rows, which are the same memory."""

    def shards(self) -> list[Shard]:
        self.row = np.arange(4, dtype=np.float32)[None]
        return [array_shard("a", self.row, global_shape=(2, 4), offset=(i, 0)) for i in (0, 1)]

    def destinations(self, saved: Saved) -> list[Shard]:
        return []


def test_load_takes_a_tensor_whose_parts_are_the_same_memory(tmp_path: Path) -> None:
    ds.snapshot([Repeated("own")], tmp_path / "c", **SMALL).wait_committed()
    assert ds.load(tmp_path / "c", **SMALL)["own"]["a"].tolist() == [[0, 1, 2, 3]] * 2


class Narrow(Split):
    """Parts that are a few columns of much wider arrays."""

    def shards(self) -> Sequence[Shard]:
        found = []
        for shard in super().shards():
            wide = np.zeros((*shard.shape[:-1], shard.shape[-1] * 16), np.float32)
            columns = wide[..., : shard.shape[-1]]
            columns[...] = self.arrays[shard.key]
            buffer = Buffer(wide.ctypes.data, wide.nbytes, owner=wide)
            stride = tuple(n // 4 for n in wide.strides)
            found.append(replace(shard, stride=stride, buffer=buffer, source=columns, lazy=False))
        return found


def test_whatever_is_read_is_verified(threads: Any, tmp_path: Path) -> None:
    """This holds even where most of what the checksums cover is not wanted."""
    path, shapes = tmp_path / "c", {"w": (1024, 1024)}

    def one(rank: int) -> None:
        ds.snapshot([Narrow.columns("model", shapes, rank, 2).fill(3)], path, **SMALL).wait_committed()

    assert threads(2, one) == [None] * 2
    assert ds.load(path, **SMALL)["model"]["w"].tobytes() == logical("w", (1024, 1024), step=3).tobytes()
    source = open_container(path / "rank-00001.pt")
    flip(source.path, int(source.index.records.data_offset[0]) + 2 + 4 * 512 * 16 * 300)
    with pytest.raises(CorruptError, match="model/w"):
        ds.load(path, **SMALL)
    with ds.open(path, **SMALL) as checkpoint, pytest.raises(CorruptError, match="model/w"):
        checkpoint["model/w"]


# --- state that ranks hold alike


def tied(scale: float) -> dict[str, Any]:
    square, long = torch.arange(36.0).reshape(6, 6) * scale, torch.arange(50_000.0) * scale
    empty = {"empty": torch.zeros(0, 3), "other_empty": torch.zeros(0, 5), "flat_empty": torch.zeros(0)}
    views = {"transposed": square.t(), "top": square[:3], "flat": square.reshape(-1), "half": long[:100]}
    return {"square": square, "tied": square, "long": long, "long_tied": long, "number": 1, **views, **empty}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_views_and_ties_of_replicas_stay_what_they_are(threads: Any, tmp_path: Path, n: int) -> None:
    """One of the ranks writes the tensors that share memory, and the other ranks' references to them stay right."""
    path, expected = tmp_path / "c", tied(1.0)

    def one(rank: int) -> None:
        providers = [ReplicatedProvider(from_state_dict("m", tied(1.0)), range(n))]
        ds.snapshot(providers, path, **SMALL).wait_committed()

    assert threads(n, one) == [None] * n
    loaded = ds.load(path, **SMALL)["m"]
    assert list(loaded) == list(expected)
    assert loaded["square"] is loaded["tied"]
    assert loaded["long"] is loaded["long_tied"]
    sizes = sum(file.stat().st_size for file in path.glob("rank-*"))
    assert sizes < 200_000 + n * 20_000  # tied tensors are stored once
    with ds.open(path, **SMALL) as checkpoint:
        for key, value in expected.items():
            if key != "number":
                assert torch.equal(loaded[key], value), key
                assert torch.equal(checkpoint[f"m/{key}"], value), key

    for m in (1, 2, 5):

        def two(rank: int, m: int = m) -> dict[str, Any]:
            state = tied(0.0)
            ds.restore([ReplicatedProvider(from_state_dict("m", state), range(m))], path, verify="digest", **SMALL)
            return state

        for state in threads(m, two):
            assert not isinstance(state, Exception), state
            assert all(k == "number" or torch.equal(state[k], v) for k, v in expected.items())


def test_a_tensor_that_two_ranks_write_is_named(threads: Any, tmp_path: Path) -> None:
    def one(rank: int) -> None:
        ds.snapshot([Split.whole("m", {"a": (3,), "b": (4,)}, 0, 1)], tmp_path / "c", **SMALL).wait_committed()

    for error in threads(2, one):
        assert isinstance(error, CommitError)
        assert "'m/a': ranks 0 and 1 both hold elements 0 to 3" in str(error)


def test_random_states_of_all_ranks_are_loaded(threads: Any, tmp_path: Path) -> None:
    def one(rank: int) -> None:
        providers = [RngProvider(), PickledObjectProvider("loop", lambda: {"rank": rank}, lambda value: None)]
        ds.snapshot(providers, tmp_path / "c", **SMALL).wait_committed()

    assert threads(2, one) == [None] * 2
    loaded = ds.load(tmp_path / "c", **SMALL)
    assert list(loaded) == ["rng@00000", "loop", "rng@00001"]
    assert all(torch.equal(loaded[f"rng@{rank:05d}"]["torch"], torch.get_rng_state()) for rank in range(2))
