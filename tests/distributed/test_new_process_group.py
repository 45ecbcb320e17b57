"""A process group that has gone and come anew: its Store's server may be the one of before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import datastates as ds
from datastates.providers import from_stateful

rank, ends = int(os.environ["RANK"]), sys.argv[2] == "closes"
# as torchrun's agent hosts it: the server outlives each group, and each rank makes a Store object anew
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
address = sys.argv[1] + "-port"
if server is not None:
    with open(address + ".new", "w") as file:
        file.write(str(server.port))
    os.rename(address + ".new", address)
while not os.path.exists(address):
    time.sleep(0.01)
port, kept, saved = int(open(address).read()), [], 0
for phase in range(3):
    number = (rank + phase) % 2 if sys.argv[3] == "swap" else rank
    store = dist.PrefixStore("same", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=dist.PrefixStore(f"group {phase}", store), rank=number, world_size=2)
    dist.distributed_c10d._world.pg_map[dist.distributed_c10d._get_default_group()] = ("gloo", store)
    providers = [from_stateful(f"model{number}", torch.nn.Linear(8, 8))]
    for _ in range(2 if ends else 1):
        ckpt = ds.Checkpointer(sys.argv[1], rank_timeout=20)
        restored = ckpt.restore(providers)
        assert (restored.step if restored else 0) == saved, (phase, restored)
        saved += 10
        ckpt.snapshot(providers, step=saved).wait_committed()
        if ends:
            ckpt.close()
        kept.append(ckpt)
    dist.barrier()
    dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("ends", "numbers"),
    [
        ("closes", "same"),
        pytest.param("stays open", "same", marks=pytest.mark.long),
        pytest.param("closes", "swap", marks=pytest.mark.long),
    ],
)
def test_a_new_group_meets_in_a_store_that_has_lived_before(
    ends: str, numbers: str, ranks: Any, tmp_path: Path
) -> None:
    ranks(2, SCRIPT, tmp_path / "run", ends, numbers)
