"""Measure how fast checkpoints become weights for other tools, and the host memory that this takes.

Each export runs in a process of its own, which imports the system first, and then resets the kernel's record of its
largest resident set (``/proc/self/clear_refs``). Mapped files are part of a resident set.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

import page_cache
from measure import Plan, Result, Sample, answer, in_new_process, interleave, status, stopwatch
from peers.exporters import EXPORTERS, SOURCES


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure every system, each sample in a fresh process."""
    side, count = (256, 8) if tiny else (4096, 90)
    result = Result(
        parameters={"bytes": 4 * side * side * count, "tensors": count},
        settings={name: exporter.settings for name, exporter in EXPORTERS.items()},
    )
    weights = {_name(number): _weight(number, side) for number in range(count)}
    for source, save in SOURCES.items():
        try:
            save(weights, directory / source)
        except Exception as error:  # what exports it fails, too
            result.fail(source, error)
    del weights
    actions = {name: partial(_sample, name, directory, side, count) for name in EXPORTERS}
    interleave(result, actions, plan, warm_up=False)
    return result


def _sample(name: str, directory: Path, side: int, count: int) -> Sample:
    exporter = EXPORTERS[name]
    source, target = directory / exporter.source, directory / exporter.target
    page_cache.drop(source)
    try:
        sample = in_new_process(__file__, name, source, target)
        if name != "raw":
            for number in (0, count - 1):
                if not torch.equal(_read(target, _name(number)), _weight(number, side)):
                    raise AssertionError(f"{name} did not export {_name(number)} as it was")
    finally:
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
    return sample


def _name(number: int) -> str:
    return f"layers.{number}.weight"


def _weight(number: int, side: int) -> torch.Tensor:
    return torch.randn(side, side, generator=torch.Generator().manual_seed(number))


def _read(target: Path, name: str) -> torch.Tensor:
    if target.is_file():
        read: Mapping[str, torch.Tensor] = torch.load(target, mmap=True)
        return read[name]
    for file in target.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor
    raise AssertionError(f"{target} lacks {name}")


def _export(name: str, source: Path, target: Path) -> None:
    export = EXPORTERS[name].prepare()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    with contextlib.redirect_stdout(sys.stderr), stopwatch() as sample:
        export(source, target)
    answer(sample | {"above": status("VmHWM") - before})


if __name__ == "__main__":
    _export(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
