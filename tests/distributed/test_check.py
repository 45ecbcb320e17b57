"""``Checkpointer.check`` finds what a commit would refuse, and writes nothing; a first failure is logged at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import logging, os, sys
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import datastates as ds
from datastates.errors import CommitError, ProviderError
from datastates.providers import PickledObjectProvider, ReplicatedProvider, from_state_dict, from_stateful

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
told = []

class Handler(logging.Handler):
    def emit(self, record):
        told.append((record.levelname, record.getMessage()))

logging.getLogger("datastates").addHandler(Handler())

def refused(*providers, error=CommitError):
    try:
        ckpt.check(providers)
    except error as found:
        return str(found)
    raise AssertionError("it was not refused")

net = torch.nn.Linear(4, 4)
for p in net.parameters():
    dist.broadcast(p.data, 0)
optimizer = torch.optim.AdamW(net.parameters())
net(torch.ones(2, 4)).sum().backward()
optimizer.step()
mesh = init_device_mesh("cpu", (2,))
part = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])

with ds.Checkpointer(f"{folder}/run", on_error="warn") as ckpt:
    dist.barrier()
    before = set(os.listdir(f"{folder}/run"))
    fine = [
        ReplicatedProvider(from_stateful("net", net)),
        ReplicatedProvider(from_stateful("optim", optimizer)),
        from_state_dict("parts", {"p": part, "n": np.arange(3)}),
        from_state_dict("objects", {"rank": rank}),
    ]
    ckpt.check(fine)
    # what each rank would write
    text = refused(from_stateful("ema", net))
    assert "'ema/bias': ranks 0 and 1 both hold" in text and "ReplicatedProvider" in text, text
    # shapes
    text = refused(ReplicatedProvider(from_state_dict("s", {"a": torch.zeros(3 + rank)})))
    assert "'s/a'" in text and "shape" in text, text
    # contents
    text = refused(from_state_dict("parts", {"p": part, "n": np.arange(3) + rank}))
    assert "'parts/n' differs between ranks 0 and 1" in text, text
    # an error of one rank is told to the other
    holder = [open(os.devnull)] if rank else [1]
    bad = PickledObjectProvider("bad", get=lambda: holder, set=print)
    text = refused(bad, error=(CommitError, ProviderError, TypeError) if rank else CommitError)
    assert rank or "rank 1" in text, text
    ckpt.check(fine)
    assert set(os.listdir(f"{folder}/run")) == before
    dist.barrier()

    # the same is told at once where nobody has asked: before the next snapshot
    snapshot = ckpt.snapshot([from_stateful("ema", net)], step=1)
    try:
        snapshot.wait_committed()
    except CommitError:
        pass
    else:
        raise AssertionError("committed")
    ckpt.wait()
    ckpt.snapshot(fine, step=2).wait_committed()
errors = [text for level, text in told if level == "ERROR"]
assert len(errors) == 1 and "none was committed before" in errors[0] and "'ema/bias'" in errors[0], told
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_state_that_cannot_commit_is_told_before_anything_is_written(ranks: Any, tmp_path: Path) -> None:
    ranks(2, SCRIPT, tmp_path, timeout=120)
