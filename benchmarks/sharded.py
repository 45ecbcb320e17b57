"""A GPT and its AdamW, sharded over all ranks by FSDP2. The logical state is the same on any number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional

from gpt import Gpt
from loops import Loop
from states import State, plain, tensors

Kind = Literal["tiny", "usual", "large", "loop"]
_SIZES = {
    "tiny": {"width": 16, "layers": 1, "heads": 2},
    "usual on cpu": {"width": 256, "layers": 4, "heads": 4},
    "usual on cuda": {"width": 1024, "layers": 8, "heads": 16},
    "large": {"width": 1024, "layers": 24, "heads": 16},
    "loop": {"width": 2048, "layers": 16, "heads": 32},
}
_BATCHES = {"cuda": (8, 1024), "cpu": (1, 32)}


class ShardedLoop(Loop):
    """A loop with fp32 parameters and moments, sharded along one dimension. On a GPU it computes in bf16.

    The state takes 12 bytes per parameter. There are 20 M parameters, 169 M on a GPU, 371 M if it is large, and 940 M
    for the loop of fsdp2_loop.py.
    torch.distributed must be initialized.
    """

    def __init__(self, device: torch.device, kind: Kind, cut: int = 0) -> None:
        """Make the model. ``cut``: the dimension along which parameters of several dimensions are sharded."""
        size = _SIZES[f"{kind} on {device.type}" if kind == "usual" else kind]
        self._gpu = device.type == "cuda"
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        with torch.device("meta"):
            model = Gpt(**size)
            # not tied, as systems differ in whether they write a tensor with two names twice
            model.head.weight = nn.Parameter(torch.empty_like(model.token.weight))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if self._gpu else None, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(
                part, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda p: Shard(cut if p.dim() > 1 else 0)
            )
        self.model = model.to_empty(device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self._gpu)
        batch, length = (1, 16) if kind == "tiny" else _BATCHES[device.type]
        self._tokens = torch.randint(Gpt.VOCABULARY, (batch, length + 1), device=device)
        self.state: State = {"model": self.model, "optimizer": self.optimizer}
        self.fill()
        self.iterate()  # creates the optimizer's moments

    def backward(self) -> None:
        logits = self.model(self._tokens[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each logical one counted once."""
        return sum(t.nbytes for _, t in tensors(plain(self.state)))

    @property
    def local_nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(_local(t).nbytes for _, t in tensors(plain(self.state)))

    def fill(self) -> None:
        """Give every element a value that depends on its place in the logical tensor."""
        for local, expected in self._expected():
            local.copy_(expected)

    def wipe(self) -> None:
        """Set everything to zero."""
        for _, tensor in tensors(plain(self.state)):
            _local(tensor).zero_()

    def check(self) -> None:
        """Raise AssertionError unless every element is as :meth:`fill` leaves it."""
        if not all(torch.equal(local, expected) for local, expected in self._expected()):
            raise AssertionError("the restore did not bring the values back")

    def _expected(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, tensor in tensors(plain(self.state)):
            local = _local(tensor)
            numbers = _numbers(tensor, local) + zlib.crc32(name.encode())
            # hashed to [0, 0.04), so that training can go on even with such values in the squared moments
            hashed = (numbers * 2654435761 >> 8 & 0xFFFFFF) * (0.04 / 2**24)
            yield local, hashed.to(local.dtype)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _numbers(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The number of each local element in the flattened logical tensor."""
    begins = (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        _, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    numbers = torch.zeros((), dtype=torch.int64, device=local.device)
    for begin, here, whole in zip(begins, local.shape, tensor.shape, strict=True):
        numbers = numbers.unsqueeze(-1) * whole + torch.arange(begin, begin + here, device=local.device)
    return numbers
