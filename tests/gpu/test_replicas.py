"""Arrays in GPU memory: two ranks compare what they hold alike, and nothing else tells a tear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import datastates as ds
from datastates.providers import from_state_dict

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import datastates as ds
from datastates.providers import ReplicatedProvider, from_state_dict, from_stateful

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
torch.cuda.set_device(0)
names = iter(range(100))

def commit(values):
    path = f"{folder}/{next(names)}"
    try:
        ds.snapshot([ReplicatedProvider(from_state_dict("s", values))], path).wait_committed()
    except ds.errors.CommitError as error:
        return str(error)
    return ""

base = torch.arange(1.0, 61.0, device="cuda")
for make in (
    lambda: base.clone(),
    lambda: base.to(torch.bfloat16)[:7].clone(),
    lambda: base.clone().reshape(6, 10).t(),
    lambda: base.clone().reshape(6, 10)[:, :7],
    lambda: base.to(torch.uint8).reshape(12, 5)[:, :3],
    lambda: base.to(torch.uint8)[3:50],
    lambda: base.clone().reshape(1, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: torch.tensor(3, device="cuda"),
    lambda: torch.nn.Parameter((torch.arange(40_000_000, device="cuda") % 1000).float()),
):
    value = make().detach()
    assert commit({"a": value}) == ""
    if rank:
        value[(-1,) * value.ndim] += 1
    assert "'s/a' differs between ranks 0 and 1" in commit({"a": value}), value.shape
    if rank:
        value[(-1,) * value.ndim] -= 1

# host and GPU hold the same: the digests are of the same function
value = torch.arange(1000.0)
assert commit({"a": value.cuda() if rank else value}) == ""

# a step that is enqueued right after the call waits for the digest of what this rank does not write
with ds.Checkpointer(f"{folder}/run", on_error="raise") as ckpt:
    torch.manual_seed(0)
    net = torch.nn.Linear(8192, 4096, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(8):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        ckpt.snapshot([ReplicatedProvider(from_stateful("m", net))], step=step)
        optimizer.step()
    ckpt.wait()
assert len([name for name in os.listdir(f"{folder}/run") if name.startswith("step-")]) >= 1
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_compare_arrays_on_a_gpu(ranks: Any, tmp_path: Path) -> None:
    ranks(2, SCRIPT, tmp_path, timeout=200)


def test_unchanged_state_of_odd_alignment_is_no_tear(tmp_path: Path) -> None:
    flat = torch.arange(1_000_003, device="cuda").to(torch.uint8)
    parts = {f"p{i}": torch.nn.Parameter(flat[i * 1000 + i : i * 1000 + 997], requires_grad=False) for i in range(200)}
    ds.snapshot([from_state_dict("s", parts)], tmp_path / "c").wait_committed()
    saved = ds.load(tmp_path / "c")["s"]
    assert all(torch.equal(saved[key], parts[key].detach().cpu()) for key in parts)
