"""Ranks save into a bucket and restore from it, on another number of ranks too; a dead rank costs its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
import torch

import datastates as ds
from datastates.storage import Location, register, stores
from datastates.storage.buckets import Buckets
from datastates.testing import equal

pytest.importorskip("obstore")
RUN = "s3://bucket/run"
SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import datastates as ds
from datastates.providers import from_state_dict
from datastates.storage.buckets import Buckets

def whole(step):
    torch.manual_seed(step)
    return {"w": torch.randn(1024, 512), "b": torch.randn(77), "step": step}

def state(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = whole(step)
    return {**made, "w": distribute_tensor(made["w"], mesh, [Shard(0)])}

dist.init_process_group("gloo")
rank = dist.get_rank()
with ds.Checkpointer(sys.argv[1], host_cache="8MiB", block="1MiB", rank_timeout=20, on_error="warn") as checkpointer:
    live = state(0)
    restored = checkpointer.restore([from_state_dict("model", live)])
    if sys.argv[2] != "0":
        assert restored.step == int(sys.argv[2])
        assert torch.equal(live["w"].full_tensor(), whole(restored.step)["w"]) and live["step"] == restored.step
    else:
        assert restored is None
    for step in map(int, sys.argv[3].split(",")):
        if step < 0 and rank == 1:
            Buckets.upload = lambda self, path, pieces, nbytes: (next(pieces), os.kill(os.getpid(), signal.SIGKILL))
        taken = checkpointer.snapshot([from_state_dict("model", state(abs(step)))], step=abs(step))
        checkpointer.wait()
        assert taken.committed == (step > 0), taken.exception()
dist.destroy_process_group()
"""


@pytest.fixture(params=["moto", pytest.param("localbucket", marks=pytest.mark.by_hand)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    pytest.importorskip(request.param)
    (folder := tmp_path / "server").mkdir()
    with servers.server(request.param, folder) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
        register("s3", Buckets(patience=5))
        yield environment


def whole(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    return {"w": torch.randn(1024, 512), "b": torch.randn(77), "step": step}


@pytest.mark.long
def test_ranks_save_and_restore(bucket: dict[str, str], ranks: Any) -> None:
    ranks(2, SCRIPT, RUN, "0", "1,2", **bucket)
    ranks(3, SCRIPT, RUN, "2", "3", **bucket)
    for step in (1, 2, 3):
        assert equal(ds.load(RUN, step=step)["model"], whole(step))
    names = Buckets().entries(Location(RUN), deep=True)
    assert sum(name.endswith("manifest.json") for name in names) == 3
    assert not any(".hold." in name for name in names)


@pytest.mark.by_hand
def test_a_rank_that_dies_costs_its_checkpoint_alone(bucket: dict[str, str], ranks: Any) -> None:
    ranks(2, SCRIPT, RUN, "0", "1,-2", may_fail=(0, 1), **bucket)
    assert equal(ds.load(RUN)["model"], whole(1))
    ranks(2, SCRIPT, RUN, "1", "4", **bucket)
    assert equal(ds.load(RUN)["model"], whole(4))
