"""What a checkpoint costs the training loop around it, and how fast the loop runs while the checkpoint drains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datastates as ds
from loops import CpuLoop, GpuLoop, Loop, MarkedLoop
from measure import Plan, Result, Sample, interleave
from peers import Pending, Roster, System
from states import nbytes
from write import remove

PERIOD = 30
"""Iterations from one checkpoint to the next."""
_LONGEST = 120.0
"""Seconds after which a checkpoint is given up."""
CPU_SYSTEMS = ("datastates", "DCP async", "torch_checkpointing async")
GPU_SYSTEMS = (
    "datastates",
    "datastates with device_cache",
    "DCP async",
    "torch_checkpointing async",
    "torch.save/load",
)


def run_cpu(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure a small network on the CPU, with a host cache large enough for the whole state."""
    loop = CpuLoop(tiny=tiny)
    return _run(loop, directory, plan, CPU_SYSTEMS, period=5 if tiny else PERIOD)


def run_gpu(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure the GPT on the GPU, with a host cache large enough for the whole state."""
    loop = GpuLoop(tiny=tiny)
    known = ds.Settings.model_fields
    systems = tuple(name for name in GPU_SYSTEMS if "device_cache" not in name or "device_cache" in known)
    return _run(loop, directory, plan, systems, period=5 if tiny else PERIOD)


def _run(loop: MarkedLoop, directory: Path, plan: Plan, systems: tuple[str, ...], *, period: int) -> Result:
    total = nbytes(loop.state)
    cache = (total // (64 << 20) + 2) * (64 << 20)
    result = Result(parameters={"bytes": total, "period": period})
    with Roster(directory, result, host_cache=cache) as roster:
        actions: dict[str, Callable[[], Sample]] = {"plain": partial(plain_period, loop, period)}
        actions.update({name: partial(_checkpoint, loop, roster, name, period) for name in systems})
        interleave(result, actions, plan)
    return result


def plain_period(loop: Loop, period: int) -> Sample:
    """Time ``period`` iterations without a checkpoint."""
    loop.synchronize()
    begin = time.perf_counter()
    for _ in range(period):
        loop.iterate()
    loop.synchronize()
    return {"seconds": time.perf_counter() - begin}


class Watch:
    """Waits on a thread until a checkpoint is durable, and notes when that was."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._error: BaseException | None = None
        self.at = 0.0
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._pending.wait()
        except BaseException as error:  # raised again by join()
            self._error = error
        self.at = time.perf_counter()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the checkpoint; raises what made it fail."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _checkpoint(loop: MarkedLoop, roster: Roster, name: str, period: int) -> Sample:
    """Save a checkpoint at the beginning of a period, and let the loop go on until it is durable.

    Returns:
        Seconds. ``call``: of the call that saves; ``seconds``: of the whole period; ``durable``: from the call until
        the checkpoint is durable; ``draining``: of one iteration between the first update and that moment, if any.
    """
    system: System = roster[name]
    loop.synchronize()
    first, begin = loop.mark(), time.perf_counter()
    pending = system.save_async(loop.state)
    sample = {"call": time.perf_counter() - begin}
    watch = Watch(pending)
    marks: list[Any] = []
    while len(marks) < period or not watch.done:
        loop.iterate(system.gate)
        marks.append(loop.mark())
        if len(marks) == period:
            loop.synchronize()
            sample["seconds"] = time.perf_counter() - begin
        if time.perf_counter() - begin > _LONGEST:
            raise TimeoutError(f"not durable after {_LONGEST} s")
    loop.synchronize()
    watch.join()
    sample["durable"] = watch.at - begin
    ends = [end for mark in marks if (end := loop.seconds(first, mark)) <= sample["durable"]]
    if len(ends) > 1:  # the first iteration includes the stall
        sample["draining"] = (ends[-1] - ends[0]) / (len(ends) - 1)
    remove(pending.path)
    return sample
