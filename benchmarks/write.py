"""Measure the durable write of a host state with each system, next to the raw program."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import raw
from measure import Plan, Result, Sample, interleave, stopwatch
from peers import Roster
from states import State, llm_like, nbytes

SYSTEMS = (
    "datastates",
    "datastates with pwrite",
    "torch.save/load",
    "safetensors",
    "DCP",
    "TorchSnapshot",
    "torch_checkpointing",
)


def remove(path: Path) -> None:
    """Delete a file or a directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def once(roster: Roster, name: str, state: State) -> Sample:
    """Save once, and delete the checkpoint."""
    system = roster[name]
    with stopwatch() as sample:
        path = system.save(state)
    remove(path)
    return sample


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure all systems and the raw write."""
    state = llm_like(tiny=tiny)
    file = raw.RawFiles((directory / "raw",), nbytes(state))
    mode = raw.best_mode(file, "write")
    result = Result(parameters={"bytes": file.nbytes}, settings={"raw": raw.in_words(mode)})
    with Roster(directory, result) as roster:
        actions = {name: partial(once, roster, name, state) for name in SYSTEMS}
        interleave(result, {"raw": lambda: file.run("write", mode), **actions}, plan)
    file.remove()
    return result
