"""One tensor out of a checkpoint, read and verified by itself."""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from views import views

import datastates as ds
from datastates import api
from datastates._base.sizes import CHUNK
from datastates.container import file as container_file
from datastates.errors import CheckpointNotFoundError, ClosedError, CorruptError, DatastatesError, SettingsError
from datastates.providers import HostTensorProvider, from_state_dict
from datastates.reading.tensors_ahead import MOST_NBYTES
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Buffer, Shard
from datastates.storage import Location

SMALL: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}
BIG = np.arange(3 * CHUNK + 77, dtype=np.float64)  # 24 chunks and a part of one: read through the executor
MIDDLE = np.arange(CHUNK // 2, dtype=np.float32)  # two chunks: read at once


@pytest.fixture
def state() -> dict[str, Any]:
    return {
        "big": torch.from_numpy(BIG),
        "middle": MIDDLE,
        "half": torch.randn(33, 5).to(torch.bfloat16),
        **views(),
        "nested": {"a/b": [np.float64([1.5, 2.5])]},
        "object": {1, 2},
        "seven": 7,
    }


KEYS = ["big", "middle", "half", "table", "row", "columns", "transposed", "scalar", "empty", "nested/a~1b/0"]


@pytest.fixture
def path(state: dict[str, Any], tmp_path: Path) -> Path:
    providers = [from_state_dict("model", state), HostTensorProvider("whole", {"": torch.ones(3)})]
    with ds.Checkpointer(tmp_path / "run", **SMALL) as checkpointer:
        checkpointer.snapshot(providers, step=30).wait_committed()
        state["scalar"] += 1
        checkpointer.snapshot(providers, step=40).wait_committed()
    return tmp_path / "run"


def value(state: dict[str, Any], key: str) -> Any:
    return state["nested"]["a/b"][0] if key.startswith("nested") else state[key]


@pytest.mark.parametrize("where", ["", "step-00000040", "step-00000040/rank-00000.pt"])
def test_every_array_is_read_by_its_full_key(path: Path, state: dict[str, Any], where: str) -> None:
    with ds.open(path / where, **SMALL) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert checkpoint.step == 40
        assert len(checkpoint) == len(KEYS) + 1
        assert set(checkpoint) == set(checkpoint.keys()) == {*(f"model/{k}" for k in KEYS), "whole"}
        assert torch.equal(checkpoint["whole"], torch.ones(3))
        for key in KEYS:
            wanted, found = value(state, key), checkpoint[f"model/{key}"]
            assert type(found) is type(wanted), key
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), key
            assert (found == wanted).all(), key


def test_an_older_step_is_opened_by_its_directory(path: Path) -> None:
    with ds.open(path / "step-00000030") as checkpoint:
        assert checkpoint.step == 30
        assert checkpoint["model/scalar"] == 5


def test_each_read_is_memory_of_its_own(path: Path) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        checkpoint["model/row"].zero_()
        checkpoint["model/big"].zero_()
        assert checkpoint["model/table"][300, 1] == 300_001
        assert checkpoint["model/big"][5] == 5


@pytest.mark.parametrize("key", ["model", "model/object", "model/seven", "model/", "whole/", "row", "", "model/row/"])
def test_what_is_no_array_is_a_key_error_that_names_it(path: Path, key: str) -> None:
    with ds.open(path) as checkpoint:
        assert key not in checkpoint
        assert checkpoint.get(key) is None
        with pytest.raises(KeyError) as caught:
            checkpoint[key]
        assert caught.value.args == (key,)


def test_looking_at_keys_reads_no_data(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(api, "make_executor", lambda settings, nbytes: made.append(nbytes))
    with ds.open(path) as checkpoint:
        monkeypatch.setattr("datastates.container.file.Container.read_row", lambda *_: pytest.fail("read"))
        assert "model/big" in checkpoint
        assert len(list(checkpoint)) == len(checkpoint)
    assert made == []


def test_digests_are_told_without_reading(path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with ds.open(path, **SMALL) as checkpoint:
        monkeypatch.setattr("datastates.container.file.Container.read_row", lambda *_: pytest.fail("read"))
        for key in ("big", "middle", "table", "row", "scalar"):
            assert checkpoint.digest(f"model/{key}") == f"{zlib.crc32(np.asarray(state[key]).tobytes()):08x}"
        assert checkpoint.digest("model/transposed") is None
        with pytest.raises(KeyError):
            checkpoint.digest("model/object")


def test_a_closed_checkpoint_reads_no_more(path: Path) -> None:
    checkpoint = ds.open(path, **SMALL)
    checkpoint["model/big"]
    checkpoint.close()
    checkpoint.close()
    for key in ("model/big", "model/middle"):
        with pytest.raises(ClosedError, match=key):
            checkpoint[key]
    assert "model/big" in checkpoint
    assert checkpoint.step == 40


def test_threads_are_started_for_large_arrays_only_and_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = api.make_executor
    monkeypatch.setattr(api, "make_executor", lambda settings, nbytes: (made.append(nbytes), make(settings, nbytes))[1])
    with ds.open(path, **SMALL) as checkpoint:
        checkpoint["model/middle"]
        assert made == []
        checkpoint["model/big"]
        checkpoint["model/big"]
        assert made == [MOST_NBYTES]


def test_many_threads_may_read(path: Path, state: dict[str, Any]) -> None:
    with ds.open(path, **SMALL) as checkpoint, ThreadPoolExecutor(8) as pool:
        keys = [k for k in KEYS if k != "empty"] * 4
        for key, found in zip(keys, pool.map(lambda k: checkpoint[f"model/{k}"], keys), strict=True):
            assert (found == value(state, key)).all(), key


def test_damage_is_found_where_it_is_read_and_named(path: Path) -> None:
    file = path / "step-00000040" / "rank-00000.pt"
    index = container_file.open_container(file).index
    for key, at in (("model/big", BIG.nbytes - 1), ("model/big", CHUNK), ("model/middle", CHUNK + 5)):
        good = file.read_bytes()
        begin = int(index.records.data_offset[index.shards.record[index.shards.by_key[key]]])
        with builtins.open(file, "r+b") as raw:
            raw.seek(begin + at)
            raw.write(bytes([good[begin + at] ^ 1]))
        with ds.open(file, **SMALL) as checkpoint:
            with pytest.raises(CorruptError, match=key) as caught:
                checkpoint[key]
            assert (caught.value.key, caught.value.path) == (key, str(file))
            assert checkpoint["model/scalar"] == 6
        file.write_bytes(good)


class Part(StateProvider):
    """A quarter of a matrix as a box, a range of it, and all of a vector and of a matrix as ranges; or some of them."""

    def __init__(self, *keys: str) -> None:
        super().__init__("part")
        self.data = np.arange(6, dtype=np.float32)
        self.keys = keys

    def shards(self) -> list[Shard]:
        buffer = Buffer(self.data.ctypes.data, self.data.nbytes, owner=self.data)
        common: dict[str, Any] = {"dtype": "float32", "kind": "numpy", "buffer": buffer}
        parts = [
            Shard("box", shape=(2, 3), stride=(3, 1), global_shape=(4, 6), offset=(2, 0), **common),
            Shard("flat", shape=(6,), stride=(1,), global_shape=(4, 6), offset=None, flat=(6, 12), **common),
            Shard("all", shape=(6,), stride=(1,), global_shape=(6,), offset=None, flat=(0, 6), **common),
            Shard("matrix", shape=(6,), stride=(1,), global_shape=(2, 3), offset=None, flat=(0, 6), **common),
        ]
        return [part for part in parts if part.key in self.keys]

    def destinations(self, saved: Saved) -> list[Shard]:
        return []


def test_parts_of_tensors_are_refused_by_name(tmp_path: Path) -> None:
    ds.snapshot([Part("box", "flat", "all")], tmp_path / "c").wait_committed()
    with ds.open(tmp_path / "c") as checkpoint:
        for key in ("part/box", "part/flat"):
            assert key in checkpoint
            with pytest.raises(DatastatesError, match=rf"{key}.*only a part.*\(4, 6\)"):
                checkpoint[key]
        assert (checkpoint["part/all"] == np.arange(6)).all()


@pytest.mark.parametrize("key", ["box", "flat"])
def test_load_refuses_a_part_by_name(tmp_path: Path, key: str) -> None:
    ds.snapshot([Part(key, "all")], tmp_path / "c").wait_committed()
    with pytest.raises(DatastatesError, match=f"'part/{key}' is not whole"):
        ds.load(tmp_path / "c")


def test_load_gives_a_whole_range_the_shape_of_its_tensor(tmp_path: Path) -> None:
    ds.snapshot([Part("matrix")], tmp_path / "c").wait_committed()
    assert ds.load(tmp_path / "c")["part"]["matrix"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ds.load(tmp_path / "c" / "rank-00000.pt")["part"]["matrix"].tolist() == [0, 1, 2, 3, 4, 5]


def test_load_refuses_memory_of_tensors_that_differ_in_shape(tmp_path: Path) -> None:
    ds.snapshot([Part("all", "matrix")], tmp_path / "c").wait_committed()
    with pytest.raises(DatastatesError, match=r"'part/all' and 'part/matrix' share memory in .*rank-00000\.pt, but"):
        ds.load(tmp_path / "c")
    with ds.open(tmp_path / "c") as checkpoint:
        assert checkpoint["part/all"].tolist() == [0, 1, 2, 3, 4, 5]
        assert checkpoint["part/matrix"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tied_tensors_are_one_even_if_only_one_has_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(6.0)
    ds.snapshot([HostTensorProvider("s", {"a": array, "b": array})], tmp_path / "c").wait_committed()
    one = container_file.open_container(Location(tmp_path / "c" / "rank-00000.pt"))
    table = one.shards
    assert table.digested.tolist() == [1, 1]  # a writer may leave any out
    lacking = replace(table, digested=np.array([1, 0], np.uint8), digest=table.digest * np.array([1, 0], np.uint32))
    without = replace(one, index=replace(one.index, shards=lacking))
    monkeypatch.setattr("datastates.formats.own.open_named", lambda named: [without])
    loaded = ds.load(tmp_path / "c")["s"]
    assert loaded["a"] is loaded["b"]
    assert loaded["a"].tolist() == array.tolist()


def test_what_cannot_be_opened_says_why(tmp_path: Path, path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        ds.open(tmp_path / "none")
    with pytest.raises(SettingsError, match="cache"):
        ds.open(path, cache=5)
    (tmp_path / "foreign.pt").write_bytes(bytes(1000))
    with pytest.raises(DatastatesError, match=r"foreign\.pt.*not a datastates container"):
        ds.open(tmp_path / "foreign.pt")
