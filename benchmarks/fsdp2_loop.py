"""Measure what a checkpoint costs an FSDP2 loop, and NCCL beside it, with this package and with its peers.

Run it by ``torchrun --nproc-per-node GPUS benchmarks/fsdp2_loop.py DIRECTORY``. All systems run one after another in
the same processes, round after round. Rank 0 prints medians; with ``--json`` it writes the samples.
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
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loops import Gate
from measure import Result
from peers import Roster, System
from sharded import ShardedLoop
from training import Watch

SYSTEMS = ("datastates", "datastates with device_cache", "DCP async", "torch_checkpointing async")
PHASES = ("forward", "backward", "step")
_SHOWN = 3
"""Iterations behind a save whose phases are told apart."""

Sample = dict[str, Any]


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

    def run(self, count: int, gate: Gate) -> None:
        """Run iterations, and enqueue their marks."""
        for _ in range(count):
            self._marks.append([])
            self._mark()
            self.loop.optimizer.zero_grad(set_to_none=True)
            self.loop.backward()
            self._mark()
            with gate():
                self.loop.optimizer.step()
            self._mark()

    def take(self) -> list[list[float]]:
        """The milliseconds of the phases of each iteration since the last call."""
        torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        found = []
        for number, one in enumerate(marks):
            ends = one if number + 1 == len(marks) else [*one[:-1], marks[number + 1][0]]
            found.append([begin.elapsed_time(end) for begin, end in itertools.pairwise(ends)])
        return found


def checkpoint(timed: Timed, system: System, period: int) -> Sample:
    """Save, and run a period: milliseconds of the call, of the host at each gate, and of the phases."""
    gate_ms: list[float] = []

    def gate() -> Any:
        begin = time.perf_counter()
        context = system.gate()
        gate_ms.append((time.perf_counter() - begin) * 1e3)
        return context

    gather()
    begin = time.perf_counter()
    pending = system.save_async(timed.loop.state)
    call = time.perf_counter() - begin
    watch = Watch(pending)
    timed.run(period, gate)
    phases = timed.take()
    seconds = time.perf_counter() - begin
    watch.join()
    sample = {"call": call * 1e3, "seconds": seconds * 1e3, "durable": (watch.at - begin) * 1e3, "phases": phases}
    gather()
    if dist.get_rank() == 0:
        shutil.rmtree(pending.path, ignore_errors=True)
    return sample


def plain(timed: Timed, period: int) -> Sample:
    """Run a period without a checkpoint."""
    gather()
    begin = time.perf_counter()
    timed.run(period, contextlib.nullcontext)
    phases = timed.take()
    return {"seconds": (time.perf_counter() - begin) * 1e3, "phases": phases}


def all_reduces(timed: Timed, system: System | None, buffer: torch.Tensor, count: int) -> float:
    """Milliseconds of an all-reduce, the mean of ``count``, while a save is being captured if there is a system."""
    gather()
    pending = system.save_async(timed.loop.state) if system else None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        dist.all_reduce(buffer)
    end.record()
    torch.cuda.synchronize()
    mean = float(begin.elapsed_time(end)) / count
    if pending is not None:
        pending.wait()
        gather()
        if dist.get_rank() == 0:
            shutil.rmtree(pending.path, ignore_errors=True)
    return mean


def gather() -> None:
    """Collect garbage, wait for this device, then for the other ranks."""
    gc.collect()
    torch.cuda.synchronize()
    dist.barrier()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoints go")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--period", type=int, default=60, help="iterations from one checkpoint to the next")
    parser.add_argument("--seconds", type=float, default=300, help="no further system is begun after these")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    begin = time.monotonic()
    gc.disable()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    timed = Timed(ShardedLoop(device, "loop"))
    result = Result()
    found: dict[str, Any] = {"ranks": dist.get_world_size(), "bytes": timed.loop.nbytes, "samples": {}, "errors": {}}
    cache = (timed.loop.nbytes // dist.get_world_size() // (64 << 20) + 4) * (64 << 20)
    buffer = torch.ones(64 << 20, device=device)  # 256 MiB
    with Roster(chosen.directory, result, host_cache=cache) as roster:
        plain(timed, 5)
        for name in tuple(chosen.systems):  # a first save plans, and page-locks memory
            try:
                checkpoint(timed, roster[name], 5)
            except Exception as error:  # a peer's, on all ranks alike: the others' samples count
                result.fail(name, error)
                chosen.systems.remove(name)
        for _ in range(chosen.rounds):
            for name in ("plain", *chosen.systems):
                late = torch.tensor([time.monotonic() - begin > chosen.seconds], dtype=torch.int32)
                dist.broadcast(late, 0)
                if late.item():
                    break
                one = plain(timed, chosen.period) if name == "plain" else checkpoint(timed, roster[name], chosen.period)
                everybody: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everybody, one)
                found["samples"].setdefault(name, []).append(everybody)
        if "datastates" in chosen.systems:
            for name in ("all-reduce", "all-reduce beside a save") * 5:
                system = roster["datastates"] if "beside" in name else None
                found["samples"].setdefault(name, []).append(all_reduces(timed, system, buffer, 60))
    found["settings"], found["errors"] = result.settings, result.errors
    if dist.get_rank() == 0:
        _print(found)
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


def _print(found: dict[str, Any]) -> None:
    samples = found["samples"]
    print(f"{found['ranks']} ranks, {found['bytes']:,} bytes; medians in ms, of the slowest rank")
    usual = statistics.median(max(rank["seconds"] for rank in ranks) for ranks in samples["plain"])
    usual_phases = _first_phases(samples["plain"])
    print(
        "plain: period",
        round(usual, 1),
        *(f"iteration {n}: {_named(ms)}" for n, ms in enumerate(usual_phases)),
        sep="\n   ",
    )
    for name, rows in samples.items():
        if name == "plain" or not isinstance(rows[0], list):
            continue
        calls, lost, durable = (
            [max(rank[key] for rank in ranks) for ranks in rows] for key in ("call", "seconds", "durable")
        )
        rate = found["bytes"] / statistics.median(durable) / 1e6
        print(f"{name}: call {_list(calls)}, lost {_list([ms - usual for ms in lost])}, {rate:.2f} GB/s until durable")
        for number, (found_ms, usual_ms) in enumerate(zip(_first_phases(rows), usual_phases, strict=True)):
            more = [ms - before for ms, before in zip(found_ms, usual_ms, strict=True)]
            print(f"   iteration {number}: {_named(more)} more")
    for name in ("all-reduce", "all-reduce beside a save"):
        if name in samples:
            print(name, _list(samples[name]))


def _first_phases(rows: list[list[Sample]]) -> list[list[float]]:
    """The milliseconds of the phases of the first iterations: the slowest rank's, the median of the rounds."""
    return [
        [
            statistics.median(max(rank["phases"][number][phase] for rank in ranks) for ranks in rows)
            for phase in range(len(PHASES))
        ]
        for number in range(_SHOWN)
    ]


def _named(phases: list[float]) -> str:
    return ", ".join(f"{name} {ms:.1f}" for name, ms in zip(PHASES, phases, strict=True))


def _list(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"


if __name__ == "__main__":
    main(sys.argv[1:])
