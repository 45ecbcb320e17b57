"""Measure the durable save of a GPU's state and its restore from a cold file, next to the raw program."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import page_cache
import raw
from loops import GpuLoop
from measure import Plan, Result, Sample, interleave, stopwatch
from peers import Roster
from states import Probe, State, nbytes
from write import remove

SYSTEMS = ("datastates", "torch.save/load", "DCP")
_PEER_ROUNDS = 2
"""Rounds of the peers. They are slow and far from every target, so few rounds do, and the suite ends in time."""
TMPFS = Path("/dev/shm")


def run(directory: Path, plan: Plan, *, tmpfs: bool, tiny: bool) -> Result:
    """Measure all systems and the raw program, which uses O_DIRECT, or threads on tmpfs.

    Files on tmpfs are always in memory, so nothing is dropped from the page cache there.
    """
    loop = GpuLoop(tiny=tiny)
    raw_path = directory / "raw"
    file = raw.RawFiles((raw_path,), nbytes(loop.state), direct=not tmpfs)
    room = shutil.disk_usage(directory).free
    if room < 1.5 * file.nbytes:
        raise RuntimeError(f"{directory} has room for {room} bytes, which is too little for {file.nbytes}")
    write_mode, read_mode = raw.best_mode(file, "write"), raw.best_mode(file, "read")
    prepare: Callable[[Path], None] = (lambda path: None) if tmpfs else page_cache.drop
    probe = Probe(loop.state)
    cache = (file.nbytes // (64 << 20) + 2) * (64 << 20)
    result = Result(
        parameters={"bytes": file.nbytes},
        settings={"raw": f"write: {raw.in_words(write_mode)}; read: {raw.in_words(read_mode)}"},
    )

    def raw_once() -> Sample:
        written = file.run("write", write_mode)
        prepare(raw_path)
        sample = {"write": written["seconds"], "read": file.run("read", read_mode)["seconds"]}
        file.remove()
        return sample

    with Roster(directory, result, host_cache=cache) as roster:
        actions = {name: partial(_once, roster, name, loop.state, probe, prepare) for name in SYSTEMS}
        interleave(result, {"raw": raw_once, **actions}, plan, rounds=dict.fromkeys(SYSTEMS[1:], _PEER_ROUNDS))
    return result


def _once(roster: Roster, name: str, state: State, probe: Probe, prepare: Callable[[Path], None]) -> Sample:
    """Save, drop the files from the page cache, restore and check them, and delete them."""
    system = roster[name]
    torch.cuda.synchronize()
    with stopwatch() as write:
        path = system.save(state)
    probe.wipe()
    prepare(path)
    torch.cuda.synchronize()
    with stopwatch() as read:
        system.restore(path, state)
        torch.cuda.synchronize()
    probe.check()
    remove(path)
    return {"write": write["seconds"], "read": read["seconds"], "cpu_seconds": write["cpu_seconds"]}
