"""Measure the restore of a host state in place, from cold and from cached files, next to the raw read.

A process that has just started restores once: its memory and its threads are still to come. Other processes restore
many times.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import page_cache
import raw
from measure import Plan, Result, Sample, answer, in_new_process, interleave, stopwatch
from peers import Roster, class_of
from states import Probe, State, llm_like, nbytes
from write import remove

SYSTEMS = (
    "datastates",
    "torch.save/load",
    "torch.save/load mmap",
    "safetensors",
    "DCP",
    "TorchSnapshot",
    "torch_checkpointing",
)
COLD_SYSTEMS = ("datastates", "datastates with pwrite", *SYSTEMS[1:])


class _Saved:
    """The checkpoint of each system, saved at first use."""

    def __init__(self, roster: Roster, state: State, *, tiny: bool) -> None:
        self._roster = roster
        self._state = state
        self._tiny = tiny
        self._probe = Probe(state)
        self._paths: dict[str, Path] = {}

    def _path(self, name: str) -> Path:
        if name not in self._paths:
            self._paths[name] = self._roster[name].save(self._state)
        return self._paths[name]

    def restore(self, name: str, prepare: Callable[[Path], None]) -> Sample:
        """Restore once, and check the values."""
        path = self._path(name)
        self._probe.wipe()
        prepare(path)
        with stopwatch() as sample:
            self._roster[name].restore(path, self._state)
        self._probe.check()
        return sample

    def restore_first(self, name: str) -> Sample:
        """Restore cold files once in a new process."""
        return in_new_process(__file__, name, self._path(name), "tiny" if self._tiny else "large")

    def remove(self) -> None:
        """Delete all checkpoints."""
        for path in self._paths.values():
            remove(path)


def run(directory: Path, plan: Plan, *, files: Literal["cold", "cached", "cold, first"], tiny: bool) -> Result:
    """Measure all systems and the raw read, which uses O_DIRECT on cold files and threads on cached ones.

    Cold files have the raw restore as well, which takes checksums and copies besides.
    """
    state = llm_like(tiny=tiny)
    cold = files != "cached"
    prepare = page_cache.drop if cold else page_cache.fill
    path = directory / "raw"
    file = raw.RawFiles((path,), nbytes(state), direct=cold)
    modes = raw.reader_modes(file, restores=cold)
    file.run("write", modes["raw"])

    def run_raw(name: str) -> Sample:
        prepare(path)
        return file.run(raw.READERS[name], modes[name])

    settings = {name: raw.in_words(mode) for name, mode in modes.items()}
    result = Result(parameters={"bytes": file.nbytes}, settings=settings)
    with Roster(directory, result) as roster:
        saved = _Saved(roster, state, tiny=tiny)
        actions = {name: partial(run_raw, name) for name in modes}
        if files == "cold, first":
            actions |= {name: partial(saved.restore_first, name) for name in SYSTEMS}
        else:
            actions |= {name: partial(saved.restore, name, prepare) for name in (COLD_SYSTEMS if cold else SYSTEMS)}
        interleave(result, actions, plan)
        saved.remove()
    file.remove()
    return result


def _child(name: str, path: Path, *, tiny: bool) -> None:
    state = llm_like(tiny=tiny)
    probe = Probe(state)
    probe.wipe()
    system_class = class_of(name)
    page_cache.drop(path)
    gc.collect()
    with stopwatch() as sample:
        system = system_class(path.parent)
        system.restore(path, state)
    probe.check()
    system.close()
    answer(sample)


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]), tiny=sys.argv[3] == "tiny")
