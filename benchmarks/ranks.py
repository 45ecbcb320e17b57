"""Measure saving and restoring the sharded state of several ranks, next to the raw program."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import page_cache
import raw
from measure import Plan, Result, Sample, cores, interleave
from team import Team
from write import remove

LAYOUTS = ((2, 2), (2, 1), (1, 2), (4, 2))
"""How many ranks save, and how many restore."""
_ROUNDS = 3
"""The most rounds to run, as machines with several GPUs are lent for a short time only."""
_SUMMED = {"needed", "fetched"}
"""Figures that are summed over all ranks. Of the others, the largest counts."""
TRIED = 10**9
"""Bytes with which the raw program's modes are tried."""


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure all systems in each layout for which the machine has enough GPUs, or enough cores without a GPU."""
    result = Result()
    gpu = torch.cuda.is_available()
    # a tiny run does not need a core for each process
    room = torch.cuda.device_count() if gpu else max(LAYOUTS)[0] if tiny else cores()
    layouts = [layout for layout in LAYOUTS if max(layout) <= room]
    for saving, restoring in [layout for layout in LAYOUTS if layout not in layouts]:
        why = f"skipped: {max(saving, restoring)} ranks need a {'GPU' if gpu else 'core'} each, here are {room}"
        print(f"  {saving} → {restoring} {why}", flush=True)
        result.settings[f"{saving} → {restoring}"] = why
    if not layouts:
        return result
    with contextlib.ExitStack() as stack:
        sizes = sorted({size for layout in layouts for size in layout})
        teams = {size: stack.enter_context(Team(size, "tiny" if tiny else "usual")) for size in sizes}
        total: int = teams[sizes[0]].call("nbytes")[0]
        period = 2 if tiny else 40 if gpu else 3
        result.parameters = {"bytes": total, "period": period}
        cache = (total // sizes[0] // (64 << 20) + 2) * (64 << 20)
        actions: dict[str, Callable[[], Sample]] = {}
        for saving, restoring in layouts:
            ceiling = _Ceiling.of(directory, total, saving, restoring)
            folder = directory / f"{saving}-ranks"
            systems = _Layout(teams[saving], teams[restoring], folder, cache, period, result.settings)
            here: dict[str, Callable[[], Sample]] = {
                "raw": ceiling.once,
                "plain": systems.plain,
                "datastates": partial(systems.both, "datastates"),
                "datastates through DCP": partial(systems.both, "datastates through DCP"),
                "DCP": partial(systems.durable, "DCP"),
                "DCP async": partial(systems.training, "DCP async"),
            }
            suffix = f", {saving} → {restoring}"
            actions.update({system + suffix: action for system, action in here.items()})
            result.settings["raw" + suffix] = ceiling.in_words()
        interleave(result, actions, replace(plan, repeat=min(plan.repeat, _ROUNDS)))
        for size, team in teams.items():
            _close(size, team, result)
    return result


def _close(size: int, team: Team, result: Result) -> None:
    """Close the systems of a team, and record errors. The samples stay, whatever happens."""
    try:
        closed = team.call("close") if team.running else []
    except Exception as error:
        result.fail(f"closing, {size} ranks", error)
        return
    for errors in closed:
        for system, what in errors.items():
            result.errors.setdefault(f"{system}, {size} ranks", what)


@dataclass(frozen=True)
class _Ceiling:
    """The raw program with a process for each rank. It writes new files, and reads files that were written once."""

    written: raw.RawFiles
    write_mode: raw.Mode
    stored: raw.RawFiles
    read_mode: raw.Mode

    @classmethod
    def of(cls, directory: Path, nbytes: int, saving: int, restoring: int) -> _Ceiling:
        def files(what: str, count: int) -> raw.RawFiles:
            return raw.RawFiles(tuple(directory / f"raw-{saving}-{restoring}-{what}-{i}" for i in range(count)), nbytes)

        written, stored = files("written", saving), files("stored", restoring)
        read_mode = raw.best_mode(stored, "read", TRIED)
        stored.run("write", read_mode)
        return cls(written, raw.best_mode(written, "write", TRIED), stored, read_mode)

    def once(self) -> Sample:
        sample = {"write": self.written.run("write", self.write_mode)["seconds"]}
        self.written.remove()
        for path in self.stored.paths:
            page_cache.drop(path)
        return sample | {"read": self.stored.run("read", self.read_mode)["seconds"]}

    def in_words(self) -> str:
        """The modes, in words."""
        n, m = len(self.written.paths), len(self.stored.paths)
        write, read = raw.in_words(self.write_mode), raw.in_words(self.read_mode)
        return f"{n} processes write: {write}; {m} processes read: {read}"


@dataclass(frozen=True)
class _Layout:
    """The systems, on a team of ranks that saves and a team that restores."""

    saving: Team
    restoring: Team
    directory: Path
    host_cache: int
    period: int
    settings: dict[str, str]

    def plain(self) -> Sample:
        """Training without a checkpoint."""
        return together(self.saving.call("train", period=self.period))

    def both(self, system: str) -> Sample:
        """Everything to measure of a system, in one sample."""
        return self.durable(system) | self.training(system)

    def durable(self, system: str) -> Sample:
        """Save, drop the files from the page cache, restore, and delete."""
        saved = self._call(self.saving, "save", system)
        path = saved[0][1]
        page_cache.drop(path)
        restored = self._call(self.restoring, "restore", system, path=path)
        remove(path)
        return together([sample for sample, _ in saved]) | together(restored)

    def training(self, system: str) -> Sample:
        """Save while training goes on, and delete."""
        saved = self._call(self.saving, "checkpoint", system, period=self.period)
        remove(saved[0][1])
        return together([sample for sample, _ in saved])

    def _call(self, team: Team, command: str, system: str, **arguments: Any) -> list[Any]:
        answers = team.call(command, system=system, directory=self.directory, host_cache=self.host_cache, **arguments)
        self.settings.update(team.call("settings")[0])
        return answers


def together(samples: Sequence[Sample]) -> Sample:
    """Combine the samples of all ranks into one."""
    return {
        figure: (math.fsum if figure in _SUMMED else max)(sample[figure] for sample in samples) for figure in samples[0]
    }
