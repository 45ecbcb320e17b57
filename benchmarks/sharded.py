"""A GPT and its AdamW, sharded over all ranks by FSDP2. The logical state is the same on any number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from gpt import Gpt
from loops import Loop
from states import State, plain, tensors

_SIZES = {
    "cuda": {"width": 1024, "layers": 8, "heads": 16},
    "cpu": {"width": 256, "layers": 4, "heads": 4},
    "tiny": {"width": 16, "layers": 1, "heads": 2},
}
_BATCHES = {"cuda": (8, 1024), "cpu": (1, 32), "tiny": (1, 16)}


class ShardedLoop(Loop):
    """A loop with fp32 parameters and moments, sharded along the first dimension. On a GPU it computes in bf16.

    The state takes 12 bytes per parameter. There are 169 M parameters with CUDA, and 20 M without. torch.distributed
    must be initialized.
    """

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        kind = "tiny" if tiny else device.type
        self._gpu = device.type == "cuda"
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        with torch.device("meta"):
            model = Gpt(**_SIZES[kind])
            # not tied, as systems differ in whether they write a tensor with two names twice
            model.head.weight = nn.Parameter(torch.empty_like(model.token.weight))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if self._gpu else None, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        self.model = model.to_empty(device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self._gpu)
        batch, length = _BATCHES[kind]
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
            first = _first(tensor) + zlib.crc32(name.encode())
            numbers = torch.arange(first, first + local.numel(), device=local.device)
            # hashed to [0, 0.04), so that training can go on even with such values in the squared moments
            hashed = (numbers * 2654435761 >> 8 & 0xFFFFFF) * (0.04 / 2**24)
            yield local, hashed.to(local.dtype).view_as(local)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first(tensor: torch.Tensor) -> int:
    """The first element of this rank's part in the flattened logical tensor, whose first dimension FSDP2 chunks."""
    if not isinstance(tensor, DTensor):
        return 0
    rows = tensor.shape[0]
    begin = min(dist.get_rank() * -(-rows // dist.get_world_size()), rows)
    return begin * (tensor.numel() // rows)
