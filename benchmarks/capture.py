"""Measure capture from the GPU into the pinned host cache, next to plain copies into pinned memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import datastates as ds
from datastates.providers import GpuTensorProvider
from measure import Plan, Result, Sample, interleave
from states import many_small


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure one tensor, one large tensor, and many small tensors of as many bytes as the first."""
    count, large = (200, 64 << 20) if tiny else (20_000, 4 << 30)
    one = count * 4096
    tensors = {
        "one tensor": {"weight": torch.ones(one // 4, device="cuda")},
        "one large tensor": {"weight": torch.ones(large // 4, device="cuda")},
        "many small tensors": many_small(count, 1024, "cuda"),
    }
    result = Result(
        parameters={"bytes": one, "large": large, "many": count},
        settings={
            **dict.fromkeys(
                tensors, "GpuTensorProvider; from the executor's call until all has landed and was compared"
            ),
            "pinned copy": "torch, cudaMemcpyAsync into page-locked memory of the same size, by CUDA events",
            "pinned copy, large": "the same, of the large tensor's size",
        },
    )
    actions: dict[str, Callable[[], Sample]] = {
        "pinned copy": _PinnedCopy(one).once,
        "pinned copy, large": _PinnedCopy(large).once,
    }
    with contextlib.ExitStack() as stack:
        for name, arrays in tensors.items():
            # a checkpointer for each state, as in training: the structure stays, and the cache holds the whole state
            cache = (sum(t.nbytes for t in arrays.values()) // (64 << 20) + 2) * (64 << 20)
            checkpointer = stack.enter_context(ds.Checkpointer(directory / name, host_cache=cache, keep_last=1))
            actions[name] = partial(_capture, checkpointer, GpuTensorProvider("state", arrays))
        interleave(result, actions, plan)
    return result


def _capture(checkpointer: ds.Checkpointer, provider: GpuTensorProvider) -> Sample:
    torch.cuda.synchronize()
    step = (checkpointer.latest() or 0) + 1
    begin = time.perf_counter()
    snapshot = checkpointer.snapshot([provider], step=step)
    called = time.perf_counter()
    snapshot.wait_captured()
    captured = time.perf_counter()
    snapshot.wait_committed()
    native = float(snapshot.report.executor["capture_seconds"])
    return {"seconds": native, "call": called - begin, "from_call": captured - begin}


class _PinnedCopy:
    """Copies into page-locked memory: the device's own copy rate."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        self._target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def once(self) -> Sample:
        """Time one copy, after a copy that is not measured."""
        begin, end = _event(), _event()
        self._target.copy_(self._source, non_blocking=True)
        begin.record()
        self._target.copy_(self._source, non_blocking=True)
        end.record()
        end.synchronize()
        return {"seconds": begin.elapsed_time(end) / 1e3}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
