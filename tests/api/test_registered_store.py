"""Checkpoints in a registered store are read as those in directories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_json
from memory_store import MemoryStore

import datastates as ds
from datastates._base.tasks import each
from datastates.cli import commands
from datastates.errors import CheckpointNotFoundError, CorruptError, StorageError
from datastates.providers import HostTensorProvider, from_pytree
from datastates.storage import Location, Traits, register, stores

OPTIONS = {"host_cache": "8MiB", "block": "1MiB"}
ROOT = "mem://bucket/run"


class SmallPieces(MemoryStore):
    """It is asked for pieces of at most 64 KiB."""

    traits = Traits(best_piece=64 << 10)

    def read_into(self, path: Location, spans: Sequence[tuple[int, memoryview]]) -> None:
        assert all(0 < len(into) <= self.traits.best_piece for _, into in spans)
        super().read_into(path, spans)


def state(step: int) -> dict[str, Any]:
    big = np.arange(300_000, dtype=np.float64) + step
    return {"big": big, "matrix": np.arange(600_000, dtype=np.float32).reshape(600, 1000) * step, "step": step}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    with ds.Checkpointer(tmp_path / "run", **OPTIONS) as checkpointer:
        for step in (1, 2):
            checkpointer.snapshot([from_pytree("model", state(step))], step=step)
    return tmp_path / "run"


@pytest.fixture
def store(local: Path) -> Iterator[MemoryStore]:
    made = SmallPieces()
    for file in local.glob("step-*/*"):
        made.create(Location(ROOT) / str(file.relative_to(local)), file.read_bytes())
    register("mem", made)
    yield made
    del stores.KINDS["mem"]


def same(found: Any, step: int) -> None:
    assert found.keys() == {"big", "matrix", "step"}
    assert (found["big"] == state(step)["big"]).all()
    assert (found["matrix"] == state(step)["matrix"]).all()
    assert found["step"] == step


@pytest.mark.parametrize(("path", "step"), [(ROOT, 2), (f"{ROOT}/step-00000001", 1)])
def test_it_is_loaded_and_restored(store: MemoryStore, path: str, step: int) -> None:
    same(ds.load(path)["model"], step)
    same(ds.load(f"{path}/", like={"model": state(0)})["model"], step)
    live = state(0)
    result = ds.restore([provider := from_pytree("model", live)], path)
    same(provider.tree, step)
    assert (result.step, result.path) == (step, f"{ROOT}/step-{step:08d}")
    assert ds.compare([from_pytree("model", state(0))], path).path == result.path


def test_another_step_is_chosen(store: MemoryStore) -> None:
    same(ds.load(ROOT, step=1)["model"], 1)
    with pytest.raises(CheckpointNotFoundError, match="of step 3 in mem://bucket/run, only of 1, 2"):
        ds.load(ROOT, step=3)
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint at mem://bucket/none"):
        ds.load("mem://bucket/none")


def test_parts_are_read_when_they_are_accessed(store: MemoryStore) -> None:
    with ds.open(ROOT) as checkpoint:
        assert (checkpoint["model/matrix"] == state(2)["matrix"]).all()


def test_one_file_is_read(store: MemoryStore) -> None:
    same(ds.load(f"{ROOT}/step-00000002/rank-00000.pt")["model"], 2)


def test_a_file_of_another_format_is_read(store: MemoryStore, tmp_path: Path) -> None:
    ds.export(ROOT, tmp_path / "model.safetensors")
    store.create(Location("mem://bucket/model.safetensors"), (tmp_path / "model.safetensors").read_bytes())
    with ds.open("mem://bucket/model.safetensors") as opened:
        assert (opened["big"] == state(2)["big"]).all()


def test_folders_of_other_formats_are_read(store: MemoryStore, tmp_path: Path) -> None:
    ds.export(ROOT, tmp_path / "weights", shard_size="3MB")
    for file in (tmp_path / "weights").iterdir():
        store.create(Location("mem://bucket/weights") / file.name, file.read_bytes())
    with ds.open("mem://bucket/weights") as opened:
        assert len(list(tmp_path.glob("weights/*.safetensors"))) > 1
        assert (opened["matrix"] == state(2)["matrix"]).all()


def test_what_several_ranks_saved_is_read(store: MemoryStore, tmp_path: Path) -> None:
    def save(rank: int) -> None:
        providers = [HostTensorProvider("part", {f"of {rank}": np.full(100_000, rank)})]
        ds.snapshot(providers, tmp_path / "both", rank=rank, world_size=2).wait_committed()

    each(save, range(2), 2)
    for file in (tmp_path / "both").iterdir():
        store.create(Location("mem://bucket/both") / file.name, file.read_bytes())
    assert store.exists(Location("mem://bucket/both/catalog.bin"))
    with ds.open("mem://bucket/both") as opened:
        assert [int(opened[f"part/of {rank}"][5]) for rank in range(2)] == [0, 1]
    assert commands.main(["verify", "mem://bucket/both"]) == 0
    live = HostTensorProvider("part", {f"of {rank}": np.zeros(100_000, int) for rank in range(2)})
    ds.restore([live], "mem://bucket/both", verify="digest")
    assert [int(live.tensors()[f"of {rank}"].sum()) for rank in range(2)] == [0, 100_000]


def test_the_commands_read_it(store: MemoryStore, local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, there = run_json(capsys, "ls", ROOT), run_json(capsys, "ls", local)
    assert listed == there
    assert commands.main(["verify", ROOT]) == commands.main(["verify", str(local)]) == 0
    assert commands.main(["inspect", ROOT]) == 0
    assert commands.main(["diff", ROOT, str(local)]) == 0


def damage(store: MemoryStore, name: str, change: Callable[[bytes], bytes]) -> None:
    path = Location(ROOT) / name
    store.replace(path, change(store.read_all(path)))


def test_damage_names_the_object(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    name = "step-00000002/rank-00000.pt"
    damage(store, name, lambda data: data[:100_000] + bytes([data[100_000] ^ 1]) + data[100_001:])
    with pytest.raises(CorruptError, match=f"in {ROOT}/{name} does not match its checksum.*step=1") as caught:
        ds.load(ROOT)
    assert caught.value.path == f"{ROOT}/{name}"
    assert commands.main(["verify", ROOT]) == 1
    same(ds.load(ROOT, step=1)["model"], 1)
    provider = from_pytree("model", state(0))
    assert ds.restore([provider], ROOT, fallback=True).step == 1


def test_a_store_that_fails_is_named(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MemoryStore, path: Location, *_: object) -> None:
        raise StorageError(13, "read", str(path))

    with ds.open(ROOT) as checkpoint:
        assert list(checkpoint)
        monkeypatch.setattr(MemoryStore, "read", fail)
        with pytest.raises(StorageError, match=rf"read {ROOT}/step-00000002/rank-00000.pt: Permission denied"):
            _ = checkpoint["model/big"]


@pytest.mark.parametrize("scheme", ["", "s", "s3:", "s3://", "/a"])
def test_a_scheme_is_checked(scheme: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(scheme))):
        register(scheme, MemoryStore())
