"""A Checkpointer that does not know of all ranks refuses, and loses nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax_ranks import IMPORTS, RANKS, reports

import datastates as ds
from datastates.providers import HostTensorProvider
from datastates.ranks import world

HEAD = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import datastates as ds
from datastates.errors import ProviderError, SettingsError
from datastates.providers import from_stateful

folder, rank = sys.argv[1], int(os.environ["RANK"])

def refused(call, error, *texts):
    try:
        call()
    except error as raised:
        assert all(text in str(raised) for text in texts), raised
    else:
        raise AssertionError("not refused")

"""

EARLY = (
    HEAD
    + """
early = ds.Checkpointer(folder)
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
stage, sharded = from_stateful(f"stage{rank}", model), torch.nn.Linear(8, 8)
fully_shard(sharded)
sharded = from_stateful("sharded", sharded)
for provider in (stage, sharded):
    refused(lambda: early.snapshot([provider], step=1), SettingsError, f"rank {rank} of 2", "init_process_group()")
refused(lambda: early.restore([stage]), SettingsError, "as rank 0 of 1")
early.close()
with ds.Checkpointer(folder) as ckpt:
    ckpt.snapshot([stage, sharded], step=2)
with ds.open(folder) as opened:
    assert {key.split("/")[0] for key in opened.keys()} == {"stage0", "stage1", "sharded"}
dist.barrier()

# another process group: the Checkpointer of the first one refuses, too
ckpt = ds.Checkpointer(folder)
ckpt.snapshot([stage], step=3).wait_committed()
dist.barrier()
dist.destroy_process_group()
refused(lambda: ds.snapshot([sharded], f"{folder}-{rank}"), ProviderError, "held only in part by this process")
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}-store", 2), rank=rank, world_size=2)
refused(lambda: ckpt.snapshot([stage], step=4), SettingsError, "parted since")
ckpt.close()
with ds.Checkpointer(folder) as ckpt:
    ckpt.snapshot([stage], step=5)
    ckpt.wait()
    assert ckpt.steps() == [2, 3, 5]
dist.barrier()
os._exit(0)
"""
)


def test_before_the_process_group_or_for_another_one(ranks: Any, tmp_path: Path) -> None:
    ranks(2, EARLY, tmp_path / "run", timeout=120)


OF_JAX = f"""{IMPORTS}
early = ds.Checkpointer(DIRECTORY, **OPTIONS)
client = start()
report("early save", **outcome(lambda: early.snapshot([state()], step=2)))
report("early restore", **outcome(lambda: early.restore([state()])))
early.close()
with ds.Checkpointer(DIRECTORY, **OPTIONS) as ckpt:
    save(ckpt, 3)
    restore(ckpt)
all_are_here(client, "end")
report("steps", steps=ckpt.steps())
"""


@pytest.mark.by_hand
def test_before_jax_distributed(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip(
        "jax", reason="JAX is not installed: a Checkpointer made before its processes met was NOT tried"
    )
    for rank, told in enumerate(reports(ranks(2, OF_JAX, tmp_path / "run", **RANKS))):
        for call in ("early save", "early restore"):
            assert told[call]["error"] == "SettingsError"
            for text in ("as rank 0 of 1", f"rank {rank} of 2", "jax.distributed.initialize()"):
                assert text in told[call]["text"]
        assert told["save 3"]["error"] is None
        assert told["restore"] == {"word": "restore", "step": 3, "wrong": []}
        assert told["steps"]["steps"] == [3]


def test_a_launcher_with_several_processes_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = [HostTensorProvider("model", {"a": np.zeros(3)})]
    with caplog.at_level(logging.WARNING, "datastates"):
        world._warn_that_alone.cache_clear()
        ds.snapshot(state, tmp_path / "told", rank=0, world_size=1).wait_committed()
        assert caplog.messages == []
        for name in ("one", "two"):
            ds.snapshot(state, tmp_path / name).wait_committed()
    assert [text for text in caplog.messages if text.startswith("WORLD_SIZE is 2, but torch.distributed is not")] != []
    assert len(caplog.messages) == 1
