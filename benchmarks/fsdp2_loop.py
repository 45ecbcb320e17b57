"""Measure what a checkpoint costs an FSDP2 loop, and NCCL beside it, with this package and with its peers.

Run it by ``torchrun --nproc-per-node GPUS benchmarks/fsdp2_loop.py DIRECTORY``. All systems run one after another in
the same processes, round after round. Rank 0 prints medians; with ``--json`` it writes a report for ``report.py``.
Garbage is collected between samples only, as trainers of large models do: a full collection takes 200 ms here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import machine
from loops import Gate
from measure import Result, Sample
from peers import Roster, System
from sharded import ShardedLoop
from tables import medians
from training import Watch

SYSTEMS = ("datastates", "datastates with device_cache", "DCP async", "torch_checkpointing async")
PHASES = ("forward", "backward", "step")
_ALONE = "all-reduce alone"
_BESIDE = "datastates, all-reduce beside a save"


class Timed:
    """A loop whose phases are timed on the GPU. An iteration's seconds end where the next one begins."""

    def __init__(self, loop: ShardedLoop) -> None:
        self.loop = loop
        self._marks: list[list[torch.cuda.Event]] = []
        loop.model.register_forward_hook(lambda *_: self._mark())

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks[-1].append(event)

    def run(self, count: int, gate: Gate) -> Sample:
        """Run iterations to their end. Returns the seconds of the first one's phases, by ``first`` and the phase."""
        for _ in range(count):
            self._marks.append([])
            self._mark()
            self.loop.optimizer.zero_grad(set_to_none=True)
            self.loop.backward()
            self._mark()
            with gate():
                self.loop.optimizer.step()
            self._mark()
        torch.cuda.synchronize()
        first, self._marks = self._marks[0], []
        times = [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(first)]
        return {f"first {phase}": seconds for phase, seconds in zip(PHASES, times, strict=True)}


def checkpoint(timed: Timed, system: System, period: int) -> Sample:
    """Save, and run a period. Returns seconds as ``training.py`` does, and those of the first iteration's phases."""
    gather()
    begin = time.perf_counter()
    pending = system.save_async(timed.loop.state)
    sample = {"call": time.perf_counter() - begin}
    watch = Watch(pending)
    sample |= timed.run(period, system.gate)
    sample["seconds"] = time.perf_counter() - begin
    watch.join()
    sample["durable"] = watch.at - begin
    _remove(pending.path)
    return sample


def plain(timed: Timed, period: int) -> Sample:
    """Run a period without a checkpoint."""
    gather()
    begin = time.perf_counter()
    phases = timed.run(period, contextlib.nullcontext)
    return phases | {"seconds": time.perf_counter() - begin}


def all_reduces(timed: Timed, system: System | None, buffer: torch.Tensor, count: int) -> Sample:
    """Seconds of an all-reduce, the mean of ``count``, while a save is being captured if there is a system."""
    gather()
    pending = system.save_async(timed.loop.state) if system else None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        dist.all_reduce(buffer)
    end.record()
    torch.cuda.synchronize()
    mean = float(begin.elapsed_time(end)) / count / 1e3
    if pending is not None:
        pending.wait()
        _remove(pending.path)
    return {"all-reduce": mean}


def gather() -> None:
    """Collect garbage, wait for this device, then for the other ranks."""
    gc.collect()
    torch.cuda.synchronize()
    dist.barrier()


def _remove(path: Path) -> None:
    """Delete a checkpoint once all ranks have seen its end."""
    gather()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoints go")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--period", type=int, default=60, help="iterations from one checkpoint to the next")
    parser.add_argument("--seconds", type=float, default=300, help="no further sample is begun after these")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    until = time.monotonic() + chosen.seconds
    gc.disable()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    timed = Timed(ShardedLoop(device, "loop"))
    result = Result({"bytes": timed.loop.nbytes, "period": chosen.period})
    cache = (timed.loop.nbytes // dist.get_world_size() // (64 << 20) + 4) * (64 << 20)
    with Roster(chosen.directory, result, host_cache=cache) as roster:
        _measure(timed, roster, chosen, result, until)
    report = {
        "suite": "fsdp2_loop",
        "tiny": False,
        "repeat": chosen.rounds,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.describe(chosen.directory),
        "benchmarks": {"fsdp2-loop": asdict(result)},
    }
    if dist.get_rank() == 0:
        print(medians(report["benchmarks"]["fsdp2-loop"]))
        if chosen.json:
            chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


def _measure(timed: Timed, roster: Roster, chosen: Any, result: Result, until: float) -> None:
    plain(timed, 5)
    for name in tuple(chosen.systems):  # a first save plans, and page-locks memory
        try:
            checkpoint(timed, roster[name], 5)
        except Exception as error:  # a peer's, on all ranks alike: the others' samples count
            result.fail(name, error)
            chosen.systems.remove(name)
    for _ in range(chosen.rounds):
        for name in ("plain", *chosen.systems):
            late = torch.tensor([time.monotonic() > until], dtype=torch.int32)
            dist.broadcast(late, 0)
            if late.item():
                break
            one = plain(timed, chosen.period) if name == "plain" else checkpoint(timed, roster[name], chosen.period)
            result.samples.setdefault(name, []).append(_slowest(one))
    if "datastates" not in chosen.systems:
        return
    buffer = torch.ones(64 << 20, device="cuda")  # 256 MiB
    for name in (_ALONE, _BESIDE) * 5:
        system = roster["datastates"] if name == _BESIDE else None
        result.samples.setdefault(name, []).append(_slowest(all_reduces(timed, system, buffer, 60)))


def _slowest(sample: Sample) -> Sample:
    """The largest figures of all ranks."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, sample)
    return {figure: max(one[figure] for one in everybody) for figure in sample}


if __name__ == "__main__":
    main()
