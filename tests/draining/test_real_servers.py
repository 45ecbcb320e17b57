"""Checkpoints come into buckets of real servers and back to a disk with every byte, from one rank and from two."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command
import pytest
import servers
import torch
from framework_folders import contents, drain, make, names

import datastates as ds
from datastates.cli import commands
from datastates.commit import manifest
from datastates.commit.tiers import tier_of
from datastates.providers import from_state_dict
from datastates.storage import Location, register, store_of, stores
from datastates.storage.buckets import Buckets
from datastates.testing import equal

pytest.importorskip("obstore")
pytestmark = pytest.mark.long
KINDS = [
    "moto",
    pytest.param("localbucket", marks=pytest.mark.by_hand),
    pytest.param("azurite", marks=pytest.mark.long),
]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import datastates as ds
from datastates.providers import from_state_dict

def whole(step):
    torch.manual_seed(step)
    return {"w": torch.randn(2048, 1536), "b": torch.randn(77), "step": step}

def state(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = whole(step)
    return {**made, "w": distribute_tensor(made["w"], mesh, [Shard(0)])}

dist.init_process_group("gloo")
first, before, steps, *tiers = sys.argv[1:]
with ds.Checkpointer(first, tiers=tiers, host_cache="32MiB", block="1MiB", rank_timeout=20) as checkpointer:
    live = state(0)
    restored = checkpointer.restore([from_state_dict("model", live)])
    assert (restored.step if restored else 0) == int(before), restored
    if restored:
        assert torch.equal(live["w"].full_tensor(), whole(restored.step)["w"]) and live["step"] == restored.step
    for step in map(int, steps.split(",")):
        checkpointer.snapshot([from_state_dict("model", state(step))], step=step).wait_committed()
    checkpointer.wait_drained(50)
dist.destroy_process_group()
"""


@pytest.fixture(params=KINDS)
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    """The address of a bucket."""
    (folder := tmp_path / "server").mkdir()
    with servers.server(request.param, folder) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        root = Location(servers.ROOTS[request.param])
        monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
        register(root.scheme, Buckets(patience=5))
        yield root


def whole(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    return {"w": torch.randn(2048, 1536), "b": torch.randn(77), "step": step}


def of_each_type(step: int) -> dict[str, Any]:
    """A state of several parts of an upload, and of every kind of thing."""
    made = {f"{kind}": torch.arange(step, step + 300).to(kind) for kind in (torch.bfloat16, torch.int8, torch.bool)}
    return {**whole(step), **made, "empty": torch.zeros(0, 3), "large": torch.randn(3_000_000).to(torch.bfloat16)}


def files(place: Path | Location | str) -> dict[tuple[int, str], dict[str, bytes]]:
    """The bytes of the containers and the catalog of each checkpoint in a place, under their plain names."""
    found = {}
    for one in tier_of(Location.of(place)).checkpoints(certain=True):
        made = manifest.open(one.path)
        assert (one.step, one.attempt) not in found
        found[one.step, one.attempt] = {
            file.name.replace(f".{one.attempt}", ""): store_of(file).read_all(file)
            for file, _ in manifest.files_of(one.path, made)
        }
    return found


def save(checkpointer: ds.Checkpointer, step: int) -> None:
    checkpointer.snapshot([from_state_dict("model", of_each_type(step))], step=step).wait_committed()


def test_every_byte_comes_to_a_bucket_and_back(
    bucket: Location, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, run = tmp_path / "first", f"{bucket}/run"
    with ds.Checkpointer(first, tiers=run) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
        checkpointer.wait_drained(50)
        assert files(run) == files(first)
    assert command.run(capsys, "fetch", run, tmp_path / "one")[0] == 0
    assert command.run(capsys, "drain", run, tmp_path / "all")[0] == 0
    assert files(tmp_path / "all") == files(first)
    assert [step for step, _ in files(tmp_path / "one")] == [2]
    for place, step in (("one", 2), ("all", 1), ("all", 2)):
        path = Path(f"step-{step:08d}")
        fetched, source = (
            torch.load(tmp_path / there / path / "rank-00000.pt", weights_only=False) for there in (place, "first")
        )
        assert equal(fetched, source)
        assert equal(fetched["model"], of_each_type(step))
    assert command.run(capsys, "verify", run)[0] == 0
    assert not any(".hold." in name for name in store_of(bucket).entries(Location(run), deep=True))


def test_what_does_not_change_is_sent_once(
    bucket: Location, tmp_path: Path, linking: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for first, tiers in ((f"{bucket}/run", []), (tmp_path / "first", [f"{bucket}/further"])):
        state, place = of_each_type(1), (tiers or [first])[0]
        with ds.Checkpointer(first, tiers=tiers, incremental=True) as checkpointer:
            for step in range(4):
                state["b"] += 1
                checkpointer.snapshot([from_state_dict("model", state)], step=step).wait_committed()
            checkpointer.wait_drained(50)
        there = store_of(bucket).entries(Location(place), deep=True)
        assert [name.rpartition("/")[2] for name in there].count("rank-00000.kept.pt") == 1
        assert equal(ds.load(place)["model"], state)
        assert command.run(capsys, "verify", place, "--all")[0] == 0


def test_a_disk_behind_a_bucket(bucket: Location, tmp_path: Path) -> None:
    places = [tmp_path / "first", f"{bucket}/run", tmp_path / "third"]
    with ds.Checkpointer(places[0], tiers=places[1:], keep_last=1) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
        checkpointer.wait_drained(50)
        assert [step for step, _ in files(places[0])] == [3]
        assert files(places[1]) == files(places[2])
        assert {step for step, _ in files(places[1])} == {1, 2, 3}
    with ds.Checkpointer(tmp_path / "fresh", tiers=places[1:]) as checkpointer:
        live = {name: torch.zeros_like(v) if torch.is_tensor(v) else 0 for name, v in of_each_type(0).items()}
        restored = checkpointer.restore([from_state_dict("model", live)])
        assert restored is not None
        assert str(restored.path).startswith(f"{bucket}/run/step-00000003.")
        assert equal(live, of_each_type(3))


def test_a_place_in_a_bucket_behind_another(bucket: Location) -> None:
    near, far = f"{bucket}/near", f"{bucket}/far/off"
    with ds.Checkpointer(near, tiers=far, keep_last=1) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
        checkpointer.wait_drained(50)
        assert {step for step, _ in files(near)} == {3}
        assert {step for step, _ in files(far)} == {1, 2, 3}
        assert files(near).items() <= files(far).items()
    for step in (1, 2, 3):
        assert equal(ds.load(far, step=step)["model"], of_each_type(step))


@pytest.mark.by_hand
def test_two_ranks_drain_and_restore(
    bucket: Location, tmp_path: Path, ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first, run = tmp_path / "first", f"{bucket}/run"
    ranks(2, SCRIPT, first, 0, "1,2", run)
    assert files(run) == files(first)
    assert all(set(one) == {"rank-00000.pt", "rank-00001.pt", "catalog.bin"} for one in files(run).values())
    ranks(2, SCRIPT, tmp_path / "fresh", 2, "3", run)
    assert {step for step, _ in files(run)} == {1, 2, 3}
    assert command.run(capsys, "fetch", run, tmp_path / "fetched")[0] == 0
    assert files(tmp_path / "fetched") == files(tmp_path / "fresh")
    for rank in range(2):
        path = f"step-00000003/rank-{rank:05d}.pt"
        there = [torch.load(tmp_path / place / path, weights_only=False) for place in ("fetched", "fresh")]
        assert equal(*there)
    assert equal(ds.load(tmp_path / "fetched")["model"], whole(3))


@pytest.mark.by_hand
def test_two_ranks_whose_first_tier_is_a_bucket(bucket: Location, tmp_path: Path, ranks: Any) -> None:
    near, far, disk = f"{bucket}/near", f"{bucket}/far", tmp_path / "disk"
    ranks(2, SCRIPT, near, 0, "1,2", far, disk)
    assert files(near) == files(far) == files(disk)
    for step in (1, 2):
        assert equal(ds.load(disk, step=step)["model"], whole(step))


def test_a_frameworks_folder_comes_back_whole(bucket: Location, tmp_path: Path) -> None:
    run, first = f"{bucket}/run", tmp_path / "first"
    for step, salt in ((5, 0), (10, 0), (10, 7)):  # the last one replaces the copy before it
        drain(make(first, step, salt), run)
    kept = {path.name: contents(path) for path in first.iterdir()}
    assert names(run) == ["checkpoint-10", "checkpoint-5"]
    there = store_of(bucket).entries(Location(run))
    assert len([name for name in there if name.startswith("checkpoint-10.")]) == 2, "the old copy is still there"
    shutil.rmtree(first)
    assert commands.main(["fetch", run, str(first)]) == 0
    assert {path.name for path in first.iterdir()} == {"checkpoint-10"}
    assert commands.main(["fetch", run, str(first), "--step", "5"]) == 0
    assert {path.name: contents(path) for path in first.iterdir()} == kept
    assert commands.main(["drain", str(first), run]) == 0
    assert len(store_of(bucket).entries(Location(run))) == 4
