"""A restore takes each container from the nearest place where it is whole, and says how much came from where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_store import FarStore

import datastates as ds
from datastates.commit.tiers import tier_of
from datastates.errors import CorruptError
from datastates.providers import from_state_dict
from datastates.storage import Location
from datastates.testing import equal

FAR = "far://bucket/run"
FILE = "rank-00000.pt"
RANKS = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import datastates as ds
from datastates.providers import from_state_dict

def whole(step):
    torch.manual_seed(step)
    return {"w": torch.randn(1024, 512), "step": step}

def state(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {**whole(step), "w": distribute_tensor(whole(step)["w"], mesh, [Shard(0)])}

dist.init_process_group("gloo")
first, second, what = sys.argv[1:]
with ds.Checkpointer(first, tiers=second, rank_timeout=30) as checkpointer:
    if what == "save":
        for step in (1, 2):
            checkpointer.snapshot([from_state_dict("model", state(step))], step=step)
    else:
        live = state(0)
        restored = checkpointer.restore([from_state_dict("model", live)])
        assert restored.step == 2
        assert torch.equal(live["w"].full_tensor(), whole(2)["w"]) and live["step"] == 2
        print("SOURCE", dist.get_rank(), sorted(restored.source))
dist.destroy_process_group()
"""


def state(step: int) -> dict[str, Any]:
    generator = np.random.default_rng(step)
    return {"w": generator.normal(size=200_000).astype(np.float32), "text": "x" * 5000, "step": step}


def save(checkpointer: ds.Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.snapshot([from_state_dict("model", state(step))], step=step).wait_committed()
    checkpointer.wait_drained()


def restored(checkpointer: ds.Checkpointer, **request: Any) -> tuple[int, dict[str, int]]:
    live = state(0)
    found = checkpointer.restore([from_state_dict("model", live)], **request)
    assert found is not None
    assert equal(live, state(found.step))
    return found.step, found.source


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


HARM: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "missing": lambda path: path.unlink(),
    "data": lambda path: flip(path, 0.5),
    "object": lambda path: path.write_bytes(path.read_bytes().replace(b"x" * 100, b"y" * 100)),
    "index": lambda path: flip(path, 0.999),
    "cut short": truncate,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("harm", HARM)
def test_each_container_comes_from_the_nearest_whole_place(first: Path, store: FarStore, harm: str) -> None:
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1, 2)
        HARM[harm](first / "step-00000002" / FILE)
        step, source = restored(checkpointer)
        assert step == 2
        assert source == {FAR if harm != "nothing" else str(first): 800_000}
        assert restored(checkpointer, fallback=True) == (step, source)
        assert restored(checkpointer, step=1) == (1, {str(first): 800_000})


def test_without_another_place_damage_is_told(first: Path, store: FarStore) -> None:
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1, 2)
        flip(first / "step-00000002" / FILE, 0.5)
        (path,) = [one.path for one in tier_of(Location(FAR)).checkpoints() if one.step == 2]
        (name,) = [name for name in store.names(path) if name.startswith("rank")]
        data = bytearray(store.read_all(path / name))
        data[len(data) // 2] ^= 8
        store.replace(path / name, bytes(data))
        with pytest.raises(CorruptError, match="'model/w'"):
            restored(checkpointer)
        assert restored(checkpointer, fallback=True) == (1, {str(first): 800_000})


def test_a_manifest_that_is_damaged_here_is_taken_from_the_next_place(first: Path, store: FarStore) -> None:
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        save(checkpointer, 1, 2)
    flip(first / "step-00000002" / "manifest.json", 0.5)
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        assert restored(checkpointer, fallback=True) == (2, {FAR: 800_000})


def test_a_place_that_is_absent_is_told(first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its disk may not be mounted, and the newest checkpoint may lie there."""
    with ds.Checkpointer(first, tiers=tmp_path / "other") as checkpointer:
        assert checkpointer.restore([from_state_dict("model", state(0))]) is None
        assert not caplog.text
        save(checkpointer, 1)
        assert not caplog.text
        (tmp_path / "other").rename(tmp_path / "moved")
        assert restored(checkpointer) == (1, {str(first): 800_000})
    assert f"{tmp_path / 'other'} is not there, and counts as empty" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(
    "harm", ["data", *(pytest.param(harm, marks=pytest.mark.by_hand) for harm in ("nothing", "missing", "catalog"))]
)
def test_ranks_take_their_own_containers_from_their_own_places(tmp_path: Path, ranks: Any, harm: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    ranks(2, RANKS, str(first), str(second), "save")
    newest = first / "step-00000002"
    if harm == "catalog":
        flip(newest / "catalog.bin", 0.9)
    else:
        HARM[harm](newest / "rank-00001.pt")
    done = ranks(2, RANKS, str(first), str(second), "restore")
    said = sorted(line for one in done for line in one.stdout.splitlines() if line.startswith("SOURCE"))
    other = second if harm in ("missing", "data") else first
    assert said == [f"SOURCE 0 {[str(first)]}", f"SOURCE 1 {[str(other)]}"]
