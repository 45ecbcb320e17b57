"""The DCP writer warns, once, of plain tensors beside DTensors, of which DCP keeps one rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import logging, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from datastates.adapters.dcp import DataStatesStorageWriter

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
told = []

class Handler(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())

logging.getLogger("datastates").addHandler(Handler())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
plain = {"steps": torch.tensor(3.0), "count": torch.arange(3)}
fully_shard(model, ignored_params=set(model[1].parameters()))
with torch.no_grad():
    model[1].bias.fill_(rank)
writer = DataStatesStorageWriter()
for i in range(2):
    dcp.save({"m": model.state_dict(), **plain}, checkpoint_id=f"{folder}/{i}", storage_writer=writer)
found = [text for text in told if "plain tensors beside DTensors" in text]
if rank == 0:
    assert len(found) == 1 and "'m.1.weight', 'm.1.bias'" in found[0] and "Checkpointer" in found[0], told
else:
    assert not found
# DCP keeps one rank's, as it does with its own writer
bias = torch.empty(8)
dcp.load({"m": {"1.bias": bias}}, checkpoint_id=f"{folder}/0")
assert bias.eq(bias[0]).all()

told.clear()
writer = DataStatesStorageWriter()
sharded = {key: value for key, value in model.state_dict().items() if key.startswith("0.")}
dcp.save({"m": sharded, **plain}, checkpoint_id=f"{folder}/2", storage_writer=writer)
dcp.save({"m": nn.Linear(3, 3).state_dict()}, checkpoint_id=f"{folder}/3", storage_writer=DataStatesStorageWriter())
assert not [text for text in told if "DTensors" in text], told
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_plain_tensors_beside_dtensors_are_warned_of(ranks: Any, tmp_path: Path) -> None:
    ranks(2, SCRIPT, tmp_path, timeout=120)
