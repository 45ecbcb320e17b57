"""A model trained in one of several layouts, saved and restored through the public API.

A test that imports this as a module is a single process. As a program it is one of several ranks:
``torch_layouts.py FOLDER WORD…``, where a word is ``save:LAYOUT``, ``take:LAYOUT:CASE`` or ``gate:LAYOUT``. A case is a
directory ``LAYOUT-RANKS`` below the folder, with checkpoints and with what they should hold. DEVICE in the environment
is ``cpu`` (with gloo) or ``cuda``.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import datastates as ds
from datastates.providers import (
    FlatLayout,
    Partition,
    PickledObjectProvider,
    ReplicatedProvider,
    RngProvider,
    ShardedZeroProvider,
    from_stateful,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from hold import GATE, held

DEVICE = os.environ.get("DEVICE", "cpu")
STEPS = 2
"""How many steps are trained before a checkpoint, and how many after it."""


class Net(nn.Module):
    """Odd sizes, an embedding tied to the head, buffers, a frozen parameter and one of no dimension."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 34)
        self.down = nn.Linear(34, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def untie(self) -> None:
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x + self.frozen(x))  # type: ignore[no-any-return]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=DEVICE == "cuda")


def whole(value: Any) -> Any:
    """A copy on the host with logical tensors, as torch gathers them, in place of a rank's parts; for comparison."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    return [whole(v) for v in value] if isinstance(value, (list, tuple)) else value


def place() -> tuple[int, int]:
    """This rank's number, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Run:
    """A training run in one layout: how the model is made and trained, and what its providers are."""

    optimizer: Any

    def __init__(self, seed: int, net: type[Net] = Net) -> None:
        self.net = self.make(net(seed).to(DEVICE))
        self.optimize()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.loop = {"epoch": 0}

    def make(self, net: Net) -> Any:
        return net

    def parameters(self) -> list[Any]:
        """What the optimizer is given."""
        return list(self.net.parameters())

    def optimize(self) -> None:
        self.optimizer = adamw(self.parameters())

    def states(self) -> list[ds.StateProvider]:
        """Providers of model and optimizer."""
        return [from_stateful("model", self.net), from_stateful("optim", self.optimizer)]

    def providers(self) -> list[ds.StateProvider]:
        loop = PickledObjectProvider("loop", lambda: dict(self.loop), self.loop.update)
        return [*self.states(), from_stateful("schedule", self.schedule), loop, RngProvider()]

    def step(self) -> None:
        self.optimizer.step()

    def taken(self) -> None:
        """What is left to do after a restore."""

    def train(self) -> None:
        """Train on the same batches on all ranks, so that the buffers are alike, too."""
        for _ in range(STEPS):
            tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(self.loop["epoch"])).to(DEVICE)
            self.net.zero_grad()
            nn.functional.cross_entropy(self.net(tokens), tokens.roll(1)).backward()
            self.step()
            self.schedule.step()
            self.loop["epoch"] += 1

    def model(self) -> dict[str, torch.Tensor]:
        """The logical tensors of the model."""
        return whole(dict(self.net.state_dict()))  # type: ignore[no-any-return]

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """The logical tensors of the optimizer, by parameter and state."""
        names = {id(p): name for name, p in self.net.named_parameters()}
        return {names[id(p)]: whole(state) for p, state in self.optimizer.state.items()}

    def logical(self) -> dict[str, Any]:
        """All that a checkpoint is to hold, whatever the layout."""
        groups = [{k: v for k, v in g.items() if "param" not in k} for g in self.optimizer.param_groups]
        clock = {"loop": dict(self.loop), "schedule": self.schedule.state_dict(), "groups": groups}
        return {"model": self.model(), "optim": self.moments(), **clock}


class Plain(Run):
    """One process."""


class Fsdp(Run):
    """FSDP2 of two layers and of the root, to whose group the tied parameters belong."""

    def make(self, net: Net) -> Any:
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)


class Named:
    """An optimizer with its states by the parameters' names, as in torch's own distributed checkpoints."""

    def __init__(self, net: Any, optimizer: Any) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> Any:
        return get_optimizer_state_dict(self.net, self.optimizer)

    def load_state_dict(self, state: Any) -> None:
        set_optimizer_state_dict(self.net, self.optimizer, state)


class NamedFsdp(Fsdp):
    """FSDP2 with the optimizer's states by name, and only of trained parameters."""

    def parameters(self) -> list[Any]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def states(self) -> list[ds.StateProvider]:
        return [from_stateful("model", self.net), from_stateful("optim", Named(self.net, self.optimizer))]


class NamedPlain(Plain):
    """One process with the optimizer's states by name."""

    parameters = NamedFsdp.parameters
    states = NamedFsdp.states


class Hybrid(Fsdp):
    """FSDP2 within pairs of ranks, which are replicas of each other."""

    def make(self, net: Net) -> Any:
        mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(net, mesh=mesh)


class Grid(Run):
    """FSDP2 over tensor parallel layers."""

    def make(self, net: Net) -> Any:
        mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(net, mesh=mesh["dp"])


class DataParallel(Run):
    """DistributedDataParallel. The optimizer's states are declared alike."""

    def make(self, net: Net) -> Any:
        return nn.parallel.DistributedDataParallel(net)

    def states(self) -> list[ds.StateProvider]:
        return [from_stateful("model", self.net), ReplicatedProvider(from_stateful("optim", self.optimizer))]

    def model(self) -> dict[str, torch.Tensor]:
        return whole(dict(self.net.module.state_dict()))  # type: ignore[no-any-return]

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name.removeprefix("module."): state for name, state in super().moments().items()}


class Zero(DataParallel):
    """torch's ZeroRedundancyOptimizer: each rank has the states of some parameters, by the parameters' numbers."""

    named = False

    def optimize(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        self.optimizer = ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.1)

    def states(self) -> list[ds.StateProvider]:
        named = self.net.module.named_parameters() if self.named else None
        zero = ShardedZeroProvider.from_zero_redundancy("optim", self.optimizer, named)
        return [from_stateful("model", self.net), zero]

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        gathered: list[Any] = [None] * dist.get_world_size()
        names = {id(p): name for name, p in self.net.module.named_parameters()}
        dist.all_gather_object(gathered, {names[id(p)]: whole(s) for p, s in self.optimizer.optim.state.items()})
        return {name: state for states in gathered for name, state in states.items()}


class NamedZero(Zero):
    """torch's ZeroRedundancyOptimizer, with the states by the parameters' names."""

    parameters = NamedFsdp.parameters
    named = True


class HandRolled(Run):
    """ZeRO-1 without a library: a flat master copy of this rank's partition, gathered after each step."""

    def optimize(self) -> None:
        self.trained = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
        sizes = [(name, tuple(p.shape)) for name, p in self.trained]
        self.layout = FlatLayout.concatenated(sizes, dist.get_rank(), dist.get_world_size(), alignment=4)
        self.master = nn.Parameter(self.partition([p.detach() for _, p in self.trained]))
        self.optimizer = adamw([self.master])

    def partition(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([t.reshape(-1) for t in tensors])
        padded = torch.zeros(self.layout.numel * dist.get_world_size())
        padded[: len(flat)] = flat
        return padded[dist.get_rank() * self.layout.numel :][: self.layout.numel].clone()

    def unflatten(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat.detach())
        sizes = [p.numel() for _, p in self.trained]
        pieces = torch.cat(parts)[: sum(sizes)].split(sizes)
        return {name: t.view(p.shape) for t, (name, p) in zip(pieces, self.trained, strict=True)}

    def step(self) -> None:
        self.master.grad = self.partition([p.grad for _, p in self.trained if p.grad is not None])
        self.optimizer.step()
        self.net.zero_grad()
        for name, tensor in self.unflatten(self.master).items():
            self.net.get_parameter(name).data.copy_(tensor)

    def states(self) -> list[ds.StateProvider]:
        share = Partition(self.layout, parameter=self.master)
        zero = ShardedZeroProvider("optim", [share], optimizer=self.optimizer)
        return [ReplicatedProvider(from_stateful("model", self.net)), zero]

    def taken(self) -> None:
        """Copy the parameters to the master copy, which was not saved."""
        with torch.no_grad():
            self.master.copy_(self.partition([p.detach() for _, p in self.trained]))

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        state = self.optimizer.state_dict()["state"].get(0, {})
        flat = {k: self.unflatten(v) for k, v in state.items() if v.ndim}
        return {
            name: {"step": state["step"].clone(), **{k: whole(v[name]) for k, v in flat.items()}}
            for name, _ in self.trained
        }


class Pipeline(Run):
    """Stages of a pipeline: each rank saves some layers of a net that all ranks train; states by name."""

    def make(self, net: Net) -> Any:
        net.untie()
        layers = list(net.named_children())
        rank, ranks = place()
        begin, end = (i * len(layers) // ranks for i in (rank, rank + 1))
        self.stage = nn.ModuleDict(dict(layers[begin:end]))
        self.others = [p for _, layer in (*layers[:begin], *layers[end:]) for p in layer.parameters()]
        return net

    def optimize(self) -> None:
        self.optimizer = adamw(self.stage.parameters())
        self.rest = adamw(self.others) if self.others else None

    def step(self) -> None:
        super().step()
        if self.rest is not None:
            for group, other in zip(self.rest.param_groups, self.optimizer.param_groups, strict=True):
                group["lr"] = other["lr"]
            self.rest.step()

    def states(self) -> list[ds.StateProvider]:
        return [from_stateful("model", self.stage), from_stateful("optim", Named(self.stage, self.optimizer))]

    def model(self) -> dict[str, torch.Tensor]:
        return gathered(whole(dict(self.stage.state_dict())))

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        names = {id(p): name for name, p in self.stage.named_parameters()}
        return gathered({names[id(p)]: whole(state) for p, state in self.optimizer.state.items()})

    def taken(self) -> None:
        """Get the other ranks' layers from them, as each rank trains those, too."""
        self.net.load_state_dict(self.model())
        moments = self.moments()
        for name, parameter in self.net.named_parameters():
            if self.rest is not None and name in moments and parameter not in self.optimizer.state:
                self.rest.state[parameter] = moments[name]


def gathered(own: dict[str, Any]) -> dict[str, Any]:
    """Merge the mappings of all ranks, which have different keys."""
    ranks: list[Any] = [own]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
    return {key: value for part in ranks for key, value in part.items()}


def save(folder: Path, layout: str) -> None:
    """Train and save. Beside the checkpoint, write the state that it must hold and the state after more training."""
    rank, ranks = place()
    case = folder / f"{layout}-{ranks}"
    run = LAYOUTS[layout](1)
    run.train()
    torch.manual_seed(100 + rank)
    with ds.Checkpointer(case / "ckpts", host_cache="8MiB", block="1MiB", rank_timeout=30) as ckpt:
        ckpt.snapshot(run.providers(), step=STEPS)
        draws = gathered({str(rank): torch.rand(3)})
        now = run.logical()
        run.train()  # while it is being saved
    later = run.logical()
    if rank == 0:
        torch.save({"now": now, "later": later, "draws": draws}, case / "expected.pt")


def take(folder: Path, layout: str, case: str) -> None:
    """Restore into another run, twice: into fresh states and in place; compare it, and go on training."""
    rank, ranks = place()
    expected = torch.load(folder / case / "expected.pt", weights_only=False)
    run = LAYOUTS[layout](2)
    for _ in range(2):
        with ds.Checkpointer(folder / case / "ckpts", host_cache="8MiB", block="1MiB", rank_timeout=30) as ckpt:
            restored = ckpt.restore(run.providers(), verify="digest")
        assert restored.step == STEPS
        assert restored.unverified_keys == []
        drawn = expected["draws"].get(str(rank))  # None if there was no such rank
        assert restored.missing_keys == (["rng"] if drawn is None else []), restored
        assert drawn is None or torch.equal(torch.rand(3), drawn)
        run.taken()
        same(run.logical(), expected["now"])
        run.train()
        # other layouts add up in another order, and GPUs in any order
        same(run.logical(), expected["later"], exact=DEVICE == "cpu" and case == f"{layout}-{ranks}")


class Wide(Net):
    """Large enough to be captured in many extents."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.wide = nn.Sequential(*(nn.Linear(768, 768) for _ in range(4)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super().forward(tokens)
        return x + self.wide(x.repeat(1, 70)[:, :768]).sum(1, keepdim=True) / 768


def gate(folder: Path, layout: str) -> None:
    """Train on while snapshots stream through a small cache: each holds the state of its call."""
    run = LAYOUTS[layout](1, Wide)
    run.train()
    calls = {}
    with ds.Checkpointer(folder / "gate", host_cache="2MiB", block="1MiB", rank_timeout=60) as ckpt:
        for step in range(3):
            calls[step] = run.logical()
            with held("capture", until=GATE):
                snapshot = ckpt.snapshot(run.providers(), step=step)
                assert not snapshot.captured
                run.train()
        ckpt.wait()
        for step, expected in calls.items():
            assert ckpt.restore(run.providers(), step=step, verify="digest").step == step
            same(run.logical(), expected)


def same(found: Any, wanted: Any, key: str = "", *, exact: bool = True) -> None:
    """Compare bit for bit, or with a tolerance for another order of additions; names the key that differs."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted) or (not exact and torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)), key
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), (key, found.keys() ^ wanted.keys())
        for k in wanted:
            same(found[k], wanted[k], f"{key}/{k}", exact=exact)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), key
        for i, item in enumerate(wanted):
            same(found[i], item, f"{key}/{i}", exact=exact)
    else:
        assert found == wanted, (key, found, wanted)


LAYOUTS: dict[str, type[Run]] = {
    "plain": Plain,
    "fsdp": Fsdp,
    "named_fsdp": NamedFsdp,
    "named": NamedPlain,
    "hybrid": Hybrid,
    "grid": Grid,
    "ddp": DataParallel,
    "zero": Zero,
    "named_zero": NamedZero,
    "flat": HandRolled,
    "pipeline": Pipeline,
}

if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    for word in sys.argv[2:]:
        verb, *names = word.split(":")
        {"save": save, "take": take, "gate": gate}[verb](Path(sys.argv[1]), *names)
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # leftover threads of torch sometimes abort a process that ends normally
