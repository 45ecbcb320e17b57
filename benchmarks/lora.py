"""Measure what a save costs a LoRA loop, whose large base is frozen and whose small adapters change.

The peak of memory is that of a process of its own for each system, which also restores what it has saved.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from loops import Loop
from measure import Plan, Result, Sample, answer, in_new_process, interleave, status, stopwatch
from peers import Roster, class_of
from peers.datastates_peer import Datastates
from states import Probe, nbytes
from training import Watch
from write import remove

INCREMENTAL = "datastates incremental"
SYSTEMS = (INCREMENTAL, "datastates", "DCP", "DCP async", "Orbax")


class LoraLoop(Loop):
    """A frozen bf16 base with fp32 norms, 1 GB in 200 arrays; fp32 adapters and moments, 11 MB; random gradients."""

    def __init__(self, *, tiny: bool) -> None:
        layers, width = (2, 128) if tiny else (22, 1280)
        square, up, down = (width, width), (3 * width, width), (width, 3 * width)
        matrices = [*2 * [(12 * width, width)], *layers * [square, square, square, square, up, up, down]]
        vectors = 2 * layers * [(width,)]
        base = [*(torch.randn(shape).bfloat16() for shape in matrices), *map(torch.randn, vectors)]
        self.model = torch.nn.ParameterList([torch.randn(s) for s in 2 * layers * [(8, width), (width, 8)]])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        named = {f"base.{i}": tensor for i, tensor in enumerate(base)}
        self.state = {"base": named, "adapters": self.model, "optimizer": self.optimizer}
        self.iterate()

    def backward(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure all systems; the first save of each, which writes all, does not count."""
    peaks = Result()
    interleave(peaks, {name: partial(_peak, name, directory, tiny) for name in SYSTEMS}, Plan(1), warm_up=False)
    loop = LoraLoop(tiny=tiny)
    base, total = loop.state["base"], nbytes(loop.state)
    parameters = {"bytes": total, "changing": total - nbytes({"base": base}), "tensors": len(base)}
    result = Result(parameters=parameters, errors=peaks.errors)
    with Roster(directory, result) as roster:
        interleave(result, {name: partial(_save, loop, roster, name) for name in peaks.samples}, plan)
        ours = roster[INCREMENTAL]
        if isinstance(ours, Datastates) and (why := ours.figures.get("in_full")):
            result.settings[INCREMENTAL] += "; NOTHING WAS SHARED in the last save"
            print(f"  {INCREMENTAL}: NOTHING WAS SHARED: {why}", file=sys.stderr)
    for name, samples in result.samples.items():
        samples[0] |= peaks.samples[name][0]
    return result


def _save(loop: LoraLoop, roster: Roster, name: str) -> Sample:
    """Save, with an iteration behind the call at once. The base of the next incremental save stays.

    Returns:
        Seconds. ``durable``: from the call until the checkpoint is durable; ``waits``: of the call and the iteration,
        less those of an iteration alone. Bytes. ``used``: by which the file system is fuller; ``written``: those that
        datastates reports.
    """
    system = roster[name]
    with stopwatch() as alone:
        loop.iterate()
    before, begin = _used(system.directory), time.perf_counter()
    pending = system.save_async(loop.state)
    watch = Watch(pending)
    loop.iterate(system.gate)
    waits = time.perf_counter() - begin - alone["seconds"]
    watch.join()
    sample = {"durable": watch.at - begin, "waits": waits, "used": float(_used(system.directory) - before)}
    if isinstance(system, Datastates):
        sample["written"] = float(system.figures["bytes"])
    for old in {*system.directory.glob("step-*")} - {pending.path} if name == INCREMENTAL else (pending.path,):
        remove(old)
    return sample


def _used(directory: Path) -> int:
    """Bytes of the file system that are in use, once everything has its blocks and removed files have none."""
    used = last = -1
    for _ in range(20):
        subprocess.run(["sync", "--file-system", directory], check=True)
        found = os.statvfs(directory)
        used, last = (found.f_blocks - found.f_bfree) * found.f_frsize, used
        if used == last:
            break
        time.sleep(0.1)
    return used


def _peak(name: str, directory: Path, tiny: bool) -> Sample:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        return in_new_process(__file__, name, folder, int(tiny))


def _child(name: str, directory: Path, *, tiny: bool) -> None:
    """Answer the peak of memory during three saves, less what was in use before the system was opened."""
    loop = LoraLoop(tiny=tiny)
    class_of(name)  # imports the system
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    with Roster(directory, Result()) as roster:
        for _ in range(3):
            _save(loop, roster, name)
        above = status("VmHWM") - before
        probe, path = Probe(loop.state), roster[name].save(loop.state)
        probe.wipe()
        roster[name].restore(path, loop.state)
        probe.check()
    answer({"above": above})


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]), tiny=bool(int(sys.argv[3])))
