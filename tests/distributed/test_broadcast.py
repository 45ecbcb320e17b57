"""Parts that several ranks hold alike: one rank reads each, and torch broadcasts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Ranks = Callable[..., list[Any]]

SCRIPT = """
import json, os, sys
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import datastates as ds
from datastates.providers import DTensorProvider, HostTensorProvider, ReplicatedProvider, from_state_dict
from datastates.state.provider import StateProvider

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
whole = torch.arange(4096.0 * 64).reshape(4096, 64)


def state(factor):
    plain = {
        "f8": (torch.arange(100_000) % 100).to(torch.float8_e4m3fn),
        "transposed": torch.arange(600_000.0).reshape(600, 1000).T,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
    }
    plain = {k: (v.float() * factor).to(v.dtype) for k, v in plain.items()}
    plain["transposed"] = (torch.arange(600_000.0).reshape(600, 1000) * factor).T
    split = {"w": distribute_tensor(whole * factor, mesh, [Replicate(), Shard(0)])}
    return plain, split, {"n": np.arange(10_000) * factor}, boxes(factor)


class Boxes(StateProvider):
    '''Two boxes of one tensor: all ranks have the first rows, and each has rows of its own.'''

    def __init__(self, boxes):
        super().__init__("boxes")
        self.boxes = boxes

    def shards(self):
        begins, everybody = (0, 1000 * (1 + rank)), (range(4), ())
        places = zip(self.boxes, begins, everybody, strict=True)
        return [ds.array_shard("b", b, global_shape=(5000,), offset=(at,), replicas=who) for b, at, who in places]


def boxes(factor):
    return [torch.full((1000,), 7.0) * factor, torch.full((1000,), 1.0 + rank) * factor]


def providers(plain, split, array, boxes):
    return [
        Boxes(boxes),
        ReplicatedProvider(from_state_dict("plain", plain)),
        DTensorProvider("split", split),
        ReplicatedProvider(HostTensorProvider("array", array)),
    ]


with ds.Checkpointer(sys.argv[1], host_cache="8MiB", block="1MiB", replicas=sys.argv[2]) as ckpt:
    ckpt.snapshot(providers(*state(1)), step=1).wait_committed()
    live = state(0)
    found = ckpt.restore(providers(*live), verify="digest")
    expected = state(1)
    same = {k: torch.equal(live[0][k].float(), v.float()) for k, v in expected[0].items()}
    same["w"] = torch.equal(live[1]["w"].to_local(), expected[1]["w"].to_local())
    same["n"] = bool((live[2]["n"] == expected[2]["n"]).all())
    same["b"] = all(map(torch.equal, live[3], expected[3]))
    print(json.dumps([same, found.read_nbytes, found.unverified_keys]))
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of torch that are left abort a process at times that ends by itself
"""


def test_one_rank_reads_what_several_hold_alike(ranks: Ranks, tmp_path: Path) -> None:
    read = {}
    for how in ("read", "broadcast"):
        done = [json.loads(d.stdout.splitlines()[-1]) for d in ranks(4, SCRIPT, tmp_path / how, how)]
        assert [{k for k, ok in same.items() if not ok} for same, _, _ in done] == [set()] * 4
        assert [unverified for _, _, unverified in done] == [
            ["plain/transposed"]
        ] * 4  # it is strided, and so has no digest
        read[how] = [nbytes for _, nbytes, _ in done]
    replicated, split, array = 100_000 + 2_400_000, 4096 * 64 * 4, 80_000
    assert sum(read["read"]) >= 4 * (replicated + array) + 2 * split
    assert sum(read["broadcast"]) <= 1.3 * (replicated + split) + 4 * 1.3 * array  # each rank reads NumPy arrays
    assert max(read["broadcast"]) < sum(read["broadcast"])
