"""A rank of test_other_formats.py: a base model of safetensors onto shards of FSDP2 and of tensor parallelism."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import datastates as ds
from datastates.providers import from_stateful

NARROW, WIDE = 16, 1 << 16
"""Half a row of the second weight is longer than a gap that is read along."""


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(NARROW, WIDE), torch.nn.Linear(WIDE, NARROW))


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    fsdp, tp = model(), model()
    for layer in fsdp:
        fully_shard(layer, mesh=mesh)
    fully_shard(fsdp, mesh=mesh)
    parallelize_module(tp, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for name, live in (("fsdp", fsdp), ("tp", tp)):
        with torch.no_grad():
            for parameter in live.parameters():
                parameter.zero_()
        restored = ds.restore([from_stateful("model", live)], folder)
        held = live.state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in held.values())
        needed = sum(tensor.to_local().nbytes for tensor in held.values())
        assert needed < 0.51 * sum(tensor.nbytes for tensor in held.values())
        assert restored.needed_nbytes == needed, (name, restored.needed_nbytes, needed)
        assert restored.read_nbytes <= needed * 1.05, (name, restored.read_nbytes, needed)
        for key, tensor in held.items():
            expected = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
            assert torch.equal(tensor.full_tensor(), expected), (name, key)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
