"""An export into a store makes the objects that a folder would get as files, and leaves nothing where it fails."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers
import torch
from memory_store import MemoryStore

import datastates as ds
from datastates.cli import commands
from datastates.errors import CorruptError, StorageError, UncertainError
from datastates.exporting import copying
from datastates.providers import from_state_dict
from datastates.storage import Location, register, store_of, stores
from datastates.storage.buckets import Buckets

pytestmark = pytest.mark.long

ROOT = "mem://bucket/out"
TARGETS = ["weights.safetensors", "weights.pt", "folder"]
OPTIONS: dict[str, dict[str, Any]] = {"folder": {"shard_size": "2MB"}}


class Failing(MemoryStore):
    """``fail(path)`` raises what making an object fails with."""

    fail: Callable[[Location], object] = staticmethod(lambda path: None)

    def create(self, path: Location, data: bytes) -> None:
        self.fail(path)
        super().create(path, data)


@pytest.fixture
def store() -> Iterator[Failing]:
    made = Failing()
    register("mem", made)
    yield made
    del stores.KINDS["mem"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    state = {f"w{n}": torch.from_numpy(generator.standard_normal((250, 1001))) for n in range(4)}
    state |= {"tied": state["w1"], "half": torch.ones(500_000, dtype=torch.bfloat16), "none": torch.ones(0, 3)}
    ds.snapshot([from_state_dict("model", state)], tmp_path / "run" / "step-00000001", step=1).wait_committed()
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 64 KiB at most, so that most tensors lie in several."""
    monkeypatch.setattr(copying, "MOST_MEMORY", 3 * 64 << 10)


def objects(place: str = ROOT) -> dict[str, bytes]:
    store, folder = store_of(Location(place)), Location(place)
    return {name: store.read_all(folder / name) for name in store.entries(folder, deep=True)}


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def up(folder: Path, address: str) -> None:
    for name, data in files(folder).items():
        store_of(Location(address)).create(Location(address) / name, data)


@pytest.mark.parametrize("cast", [None, "fp32"])
def test_the_objects_are_the_files_of_a_local_export(store: Failing, saved: Path, tmp_path: Path, cast: Any) -> None:
    for target in TARGETS:
        options = {**OPTIONS.get(target, {}), "dtype": cast}
        done = ds.export(saved, f"{ROOT}/{target}", **options)
        local = ds.export(saved, tmp_path / "out" / target, **options)
        assert done.path == f"{ROOT}/{target}"
        assert (done.files, done.nbytes, done.tied) == (local.files, local.nbytes, local.tied)
    assert len(done.files) == 5
    assert objects() == files(tmp_path / "out")


def test_from_a_bucket_into_a_bucket(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, too, and from a run in the bucket."""
    pytest.importorskip("obstore")
    pytest.importorskip("localbucket")
    (folder := tmp_path / "server").mkdir()
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("s3", Buckets(patience=1))
    monkeypatch.setattr(copying, "MOST_MEMORY", 3 << 20)
    with servers.server("localbucket", folder) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        up(saved, "s3://bucket/run")
        for target in TARGETS:
            ds.export("s3://bucket/run", f"s3://bucket/out/{target}", **OPTIONS.get(target, {}))
            ds.export("s3://bucket/run", tmp_path / "out" / target, **OPTIONS.get(target, {}))
        assert commands.main(["export", "s3://bucket/run", "s3://bucket/out/shell.pt"]) == 0
        found = objects("s3://bucket/out")
        assert found.pop("shell.pt") == found["weights.pt"]
        assert found == files(tmp_path / "out")
        assert commands.main(["export", "s3://bucket/run", "s3://bucket/out/shell.pt"]) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_exists_is_refused(store: Failing, saved: Path, target: str) -> None:
    place = Location(ROOT) / target
    store.create(place / "other" if target == "folder" else place, b"other")
    before = objects()
    with pytest.raises(FileExistsError, match=f"{ROOT}/{target}"):
        ds.export(saved, f"{ROOT}/{target}", **OPTIONS.get(target, {}))
    assert objects() == before


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_is_made_meanwhile_stays(
    store: Failing, saved: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = Location(ROOT) / target if target != "folder" else Location(ROOT) / "folder/model-00002-of-00005.safetensors"
    write = MemoryStore.create

    def fail(path: Location) -> None:
        if path == last:
            write(store, path, b"other")

    monkeypatch.setattr(store, "fail", fail)
    with pytest.raises(FileExistsError, match=f"{ROOT}/{target}"):
        ds.export(saved, f"{ROOT}/{target}", **OPTIONS.get(target, {}))
    assert list(objects().values()) == [b"other"]


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("target", ["weights.pt", "model-00003-of-00005.safetensors", "model.safetensors.index.json"])
def test_a_failed_export_leaves_nothing(
    store: Failing, saved: Path, target: str, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MemoryStore.create

    def fail(path: Location) -> None:
        if path.name == target and made:  # and the answer is lost
            write(store, path, b"data")
            raise UncertainError(0, "create", str(path), f"create {path}: no answer")
        if path.name == target:
            raise StorageError(errno.EACCES, "create", str(path))

    monkeypatch.setattr(store, "fail", fail)
    place = target if target in TARGETS else "folder"
    with pytest.raises(StorageError, match=rf"create {ROOT}/(folder/)?{target}: (Permission|no answer)"):
        ds.export(saved, f"{ROOT}/{place}", **OPTIONS.get(place, {}))
    assert objects() == {}


def test_damage_is_found_before_an_object_is_there(store: Failing, saved: Path) -> None:
    (container,) = saved.glob("*/rank-00000.pt")
    data = bytearray(container.read_bytes())
    data[len(data) // 2] ^= 1
    container.write_bytes(data)
    for target in TARGETS:
        with pytest.raises(CorruptError):
            ds.export(saved, f"{ROOT}/{target}", **OPTIONS.get(target, {}))
    assert objects() == {}
