"""What ranks hold under one key and one of them writes is equal on all, or refused with key, ranks and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HEAD = """
import os, sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import datastates as ds
from datastates.providers import ReplicatedProvider, from_state_dict, from_stateful

dist.init_process_group("gloo")
rank, ranks, folder = dist.get_rank(), dist.get_world_size(), sys.argv[1]

class Stateful:
    def __init__(self, state):
        self.state = state
    def state_dict(self):
        return self.state
    def load_state_dict(self, state):
        self.state = state

names = iter(range(100))

def refused(*providers):
    path = f"{folder}/refused-{next(names)}"
    snapshot = ds.snapshot(providers, path)
    try:
        snapshot.wait_committed()
    except ds.errors.CommitError as error:
        assert not os.path.exists(path)
        return str(error)
    raise AssertionError("it was committed")

def saved(*providers):
    path = f"{folder}/saved-{next(names)}"
    ds.snapshot(providers, path).wait_committed()
    return path

def end():
    dist.barrier()
    dist.destroy_process_group()
"""

BESIDE_DTENSORS = (
    HEAD
    + """
mesh = init_device_mesh("cpu", (ranks,))
part = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
for own in (torch.full((3,), rank), np.full(3, rank), torch.zeros(1000)):
    if isinstance(own, torch.Tensor) and len(own) == 1000 and rank:
        own[617] = 1e-42  # one element of a thousand
    text = refused(from_stateful("data", Stateful({"w": part, "pos": rank, "rng": own})))
    assert "'data/rng' differs between ranks 0 and 1: only rank 0" in text, text
# equal arrays are written once, and each rank keeps its own objects
live = Stateful({"w": part, "pos": rank, "rng": torch.ones(3), "n": np.arange(5)})
path = saved(from_stateful("data", live))
fresh = Stateful({"w": torch.zeros_like(part), "pos": -1, "rng": torch.zeros(3), "n": np.zeros(5, int)})
ds.restore([from_stateful("data", fresh)], path)
assert fresh.state["pos"] == rank and fresh.state["rng"].sum() == 3

# a DTensor that is the same on all ranks by its placements, and is not
copy = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
saved(from_state_dict("d", {"copy": copy}))
if rank:
    copy.to_local()[5] += 1
assert "'d/copy' differs between ranks 0 and 1" in refused(from_state_dict("d", {"copy": copy}))

# parameters that FSDP2 was told to ignore, and their optimizer's states
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
experts = set(model[1].parameters())
fully_shard(model, ignored_params=experts)
optimizer = torch.optim.AdamW(model.parameters())

def step():
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()

step()
saved(from_stateful("model", model), from_stateful("optim", optimizer))
for p in experts:
    p.grad = torch.full_like(p, float(rank))
optimizer.step()
text = refused(from_stateful("model", model), from_stateful("optim", optimizer))
assert "differs between ranks 0 and 1, and so do 5 more arrays" in text, text
end()
"""
)

FORMS = (
    HEAD
    + """
def both(make, lazy=False):
    # equal on both ranks, then different in one element on rank 1
    values = {"a": make()}
    path = saved(ReplicatedProvider(from_state_dict("s", values)))
    back = {"a": torch.zeros_like(make()) if isinstance(make(), torch.Tensor) else np.zeros_like(make())}
    ds.restore([from_state_dict("s", back)], path)
    assert (np.asarray(back["a"].tolist()) == np.asarray(make().tolist())).all()
    if rank == 1:
        values["a"].reshape(-1)[-1:] = 0
        if values["a"].reshape(-1)[-1] != 0:
            values["a"][(-1,) * values["a"].ndim] = 0
    text = refused(ReplicatedProvider(from_state_dict("s", values)))
    assert "'s/a' differs between ranks 0 and 1" in text, text

base = torch.arange(1.0, 61.0)
for make in (
    lambda: base.clone(),
    lambda: base.to(torch.bfloat16)[:7].clone(),  # ends inside a word
    lambda: base.clone().reshape(6, 10).t(),
    lambda: base.clone().reshape(6, 10)[:, :7],  # with gaps
    lambda: base.to(torch.uint8).reshape(12, 5)[:, :3],  # its rows are no words
    lambda: base.clone().reshape(1, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: np.arange(1, 41, dtype=np.int16).reshape(5, 8),
    lambda: np.asfortranarray(np.arange(1, 41, dtype=np.int64).reshape(5, 8)),
    lambda: torch.tensor(3),
    lambda: torch.arange(1, 400_001, dtype=torch.float64),
    lambda: nn.Parameter(torch.arange(1.0, 200_001.0), requires_grad=False),
):
    both(make)

# what lies in the gaps does not count; neither does the stride of a dimension of one element
wide = torch.zeros(6, 4)
wide[:, 3] = rank
saved(ReplicatedProvider(from_state_dict("s", {"a": wide[:, :3]})))
odd = torch.arange(3.0).as_strided((1, 3), (3 + rank, 1))
saved(ReplicatedProvider(from_state_dict("s", {"a": odd, "empty": torch.zeros(0, 3 + rank - rank)})))

# one order of elements on one rank, another on the other: not compared, and said so
matrix = torch.arange(12.0).reshape(3, 4)
text = refused(ReplicatedProvider(from_state_dict("s", {"a": matrix if rank else matrix.t().contiguous().t()})))
assert "'s/a' lies in memory in another order on rank 1 than on 0" in text and "contiguous()" in text, text

# two views of one memory, of which one differs on rank 1
flat = torch.arange(10.0)
if rank:
    flat[7] = 0
text = refused(ReplicatedProvider(from_state_dict("s", {"head": flat[:5], "tail": flat[5:]})))
assert "'s/tail' differs" in text and "more" not in text, text

# what two snapshots share: unchanged structures, and new addresses
def model():
    torch.manual_seed(1)
    return nn.Linear(30, 20)

with ds.Checkpointer(f"{folder}/run", on_error="raise") as ckpt:
    one, two = model(), model()
    for i, net in enumerate((one, one, two, two)):
        ckpt.snapshot([ReplicatedProvider(from_stateful("m", net))], step=i).wait_committed()
    if rank:
        with torch.no_grad():
            two.weight[3, 4] += 1
    snapshot = ckpt.snapshot([ReplicatedProvider(from_stateful("m", two))], step=9)
    try:
        snapshot.wait_committed()
    except ds.errors.CommitError as error:
        assert "'m/weight' differs" in str(error)
    else:
        raise AssertionError("committed")
    with torch.no_grad():
        two.weight[3, 4] = 0
    ckpt.snapshot([ReplicatedProvider(from_stateful("m", two))], step=10).wait_committed()
end()
"""
)

CHANGED = (
    HEAD
    + """
# rank 1 writes nothing of it: yet its memory is read before the gate opens, and a change before that is told
net = nn.Linear(3000, 100)
dist.broadcast(net.weight.data, 0)
dist.broadcast(net.bias.data, 0)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
with ds.Checkpointer(f"{folder}/run", on_error="warn") as ckpt:
    for step in range(4):
        snapshot = ckpt.snapshot([ReplicatedProvider(from_stateful("m", net))], step=step)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        snapshot.wait_committed()
    snapshot = ckpt.snapshot([ReplicatedProvider(from_stateful("m", net))], step=9)
    if rank == 1:
        with torch.no_grad():
            net.weight.add_(0)  # counted by torch as a change
    try:
        snapshot.wait_committed()
        torn = None
    except ds.errors.DatastatesError as error:
        torn = error
    if rank == 1 and torn is not None:
        assert isinstance(torn, (ds.errors.TornSnapshotError, ds.errors.CommitError)), torn
end()
"""
)

FOUR = (
    HEAD
    + """
# two replicas of two parts: the parts differ from each other, the replicas must not
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = fully_shard(nn.Linear(16, 16), mesh=mesh)
for p in model.parameters():
    with torch.no_grad():
        p.to_local().fill_(rank % 2)
saved(from_stateful("m", model))
if rank == 3:
    with torch.no_grad():
        model.weight.to_local()[0, 0] = 5
text = refused(from_stateful("m", model))
assert "'m/weight' differs between ranks 1 and 3" in text, text
# a part of the ranks
def stage(number):
    inner = from_state_dict(f"stage{rank % 2}", {"x": torch.full((4,), number)})
    return ReplicatedProvider(inner, [rank % 2, rank % 2 + 2])

saved(stage(rank % 2))
text = refused(stage(rank))
assert "'stage0/x' differs between ranks 0 and 2" in text or "'stage1/x' differs between ranks 1 and 3" in text, text
assert "and so do 1 more arrays" in text, text
end()
"""
)


@pytest.mark.long
def test_plain_arrays_beside_dtensors(ranks: Any, tmp_path: Path) -> None:
    ranks(2, BESIDE_DTENSORS, tmp_path, timeout=120)


@pytest.mark.long
def test_arrays_of_every_form_and_order_in_memory(ranks: Any, tmp_path: Path) -> None:
    ranks(2, FORMS, tmp_path, timeout=120)


@pytest.mark.long
def test_steps_wait_until_a_replica_that_is_not_written_is_read(ranks: Any, tmp_path: Path) -> None:
    ranks(2, CHANGED, tmp_path, timeout=120)


@pytest.mark.by_hand
def test_parts_and_groups_of_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(4, FOUR, tmp_path, timeout=180)
