"""Measure the host memory that checkpoints add to a process whose state is three times the host cache.

Each sample runs in a process of its own. The process makes the state, imports the system, resets the kernel's record of
its largest resident set (``/proc/self/clear_refs``), opens the system, saves three times, and reads the record
(``VmHWM``).
"""

from __future__ import annotations

import gc
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from measure import Plan, Result, Sample, answer, in_new_process, interleave, status
from peers import class_of

SYSTEMS = ("datastates", "DCP async")


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure every system, each sample in a fresh process."""
    cache = 16 << 20 if tiny else 256 << 20
    result = Result(
        parameters={"host_cache": cache, "bytes": 3 * cache},
        settings={"datastates": f"host_cache={cache >> 20} MiB", "DCP async": "stages a copy of the state"},
    )
    actions = {name: partial(_sample, name, directory, cache) for name in SYSTEMS}
    interleave(result, actions, plan, warm_up=False)
    return result


def _sample(name: str, directory: Path, cache: int) -> Sample:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        return in_new_process(__file__, name, folder, cache)


def _child(name: str, directory: Path, cache: int) -> None:
    parts = 12
    state = {"model": {f"weight.{i}": torch.ones(3 * cache // parts // 4) for i in range(parts)}}
    system_class = class_of(name)
    options = {"host_cache": cache, "keep_last": 1} if name == "datastates" else {}
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    system = system_class(directory, **options)
    for _ in range(3):
        system.save_async(state).wait()
    system.close()
    answer({"above": status("VmHWM") - before})


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
