"""DTensors whose local tensors consist of others, as torchao makes them, are saved and restored as by torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao import optim

import datastates as ds
from datastates.errors import ProviderError
from datastates.providers import from_state_dict, from_stateful

folder, word, *kinds = sys.argv[1:]
folder = Path(folder)
dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
torch.compiler.set_stance("force_eager")
replicated = word == "replicated"
shape, names = ((2, count // 2), ("replica", "shard")) if replicated else ((count,), ("shard",))
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)


class Object:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def make(kind, seed, steps):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 512), nn.Linear(512, 3))
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    optimizer = getattr(optim, kind)(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 256)).square().sum().backward()
        optimizer.step()
    return net, optimizer


def parts(value):
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, parts(item)) for key, item in items]
    if isinstance(value, DTensor):
        return [type(value), value.placements, value.shape, value.stride(), value.dtype, parts(value.to_local())]
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return [type(value), str(context), *(parts(getattr(value, name)) for name in names)]
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.reshape(-1).view(torch.uint8).tolist())
    return value


def providers(net, optimizer, state, obj):
    return [
        from_stateful("m", net),
        from_stateful("o", optimizer),
        from_state_dict("d", state),
        from_stateful("x", obj),
    ]


def given(net, optimizer):
    states = [dict(s) for s in optimizer.state_dict()["state"].values()]
    state = {"states": states, "rate": optimizer.param_groups[0]["lr"]}
    return net, optimizer, state, Object(dict(state))


for kind in kinds:
    if word != "other":
        source = given(*make(kind, 1, 2))
        torch.save([source[0].state_dict(), source[1].state_dict(), source[2]], folder / f"{kind}-{rank}.pt")
        ds.snapshot(providers(*source), folder / kind).wait_committed()
        assert torch.load(folder / kind / f"rank-{rank:05}.pt", weights_only=True)
        for steps in (0, 1):
            live = given(*make(kind, 2, max(steps, 1)))
            if not steps:  # an optimizer that has no state yet
                live = live[0], make(kind, 2, 0)[1], *live[2:]
            stock, other = make(kind, 2, steps)
            net, states, tree = torch.load(folder / f"{kind}-{rank}.pt", weights_only=False)
            stock.load_state_dict(net)
            other.load_state_dict(states)
            ds.restore(providers(*live), folder / kind)
            assert parts(live[0].state_dict()) == parts(stock.state_dict())
            assert parts(live[1].state_dict()) == parts(other.state_dict()), kind
            assert "OptimState" in str(parts(live[1].state_dict()))
            assert parts(live[2]) == parts(tree) == parts(live[3].state)
    else:
        live = given(*make(kind, 2, 1))
        before = parts(live[1].state_dict())
        for provider in providers(*live)[1:]:
            try:
                ds.restore([provider], folder / kind)
            except ProviderError as error:
                assert "consists of other tensors, and was saved in parts" in str(error), error
            else:
                raise AssertionError("other parts were taken")
        assert parts(live[1].state_dict()) == before
dist.destroy_process_group()
"""

LIBRARY = "torchao is not installed: its optimizers were NOT tried"


@pytest.mark.by_hand
def test_the_same_ranks_take_back_their_parts(ranks: Callable[..., object], tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason=LIBRARY)
    ranks(2, SCRIPT, tmp_path, "sharded", "AdamW8bit", "AdamW4bit", "AdamWFp8", timeout=200)
    ranks(1, SCRIPT, tmp_path, "other", "AdamW8bit", timeout=100)


@pytest.mark.by_hand
def test_ranks_with_the_same_parts_take_back_their_own(ranks: Callable[..., object], tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason=LIBRARY)
    ranks(4, SCRIPT, tmp_path, "replicated", "AdamW8bit", timeout=200)
