"""Measure the restore of a host state in place, from cold and from cached files, next to the raw read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import page_cache
import raw
from measure import Plan, Result, Sample, interleave, stopwatch
from peers import Roster
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

    def __init__(self, roster: Roster, state: State) -> None:
        self._roster = roster
        self._state = state
        self._probe = Probe(state)
        self._paths: dict[str, Path] = {}

    def restore(self, name: str, prepare: Callable[[Path], None]) -> Sample:
        """Restore once, and check the values."""
        system = self._roster[name]
        if name not in self._paths:
            self._paths[name] = system.save(self._state)
        path = self._paths[name]
        self._probe.wipe()
        prepare(path)
        with stopwatch() as sample:
            system.restore(path, self._state)
        self._probe.check()
        return sample

    def remove(self) -> None:
        """Delete all checkpoints."""
        for path in self._paths.values():
            remove(path)


def run(directory: Path, plan: Plan, *, cold: bool, tiny: bool) -> Result:
    """Measure all systems and the raw read, which uses O_DIRECT on cold files and threads on cached ones.

    Cold files have the raw restore as well, which takes checksums and copies besides.
    """
    state = llm_like(tiny=tiny)
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
        saved = _Saved(roster, state)
        actions = {name: partial(run_raw, name) for name in modes}
        actions |= {name: partial(saved.restore, name, prepare) for name in (COLD_SYSTEMS if cold else SYSTEMS)}
        interleave(result, actions, plan)
        saved.remove()
    file.remove()
    return result
