"""Measure restoring what other ranks have saved, cut in another way too, next to the raw program and DCP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import page_cache
import raw
from measure import Plan, Result, Sample, cores, interleave
from ranks import TRIED, together
from sharded import Kind
from team import Team
from write import remove

LAYOUTS = {
    "2 → 2": (2, 2, 0),
    "2 → 1": (2, 1, 0),
    "1 → 2": (1, 2, 0),
    "4 → 2": (4, 2, 0),
    "2 → 2 in columns": (2, 2, 1),
}
"""How many ranks save, how many restore, and the dimension along which the restored parameters are cut."""
_HOST_CACHE = 320 << 20
SYSTEMS = ("datastates", "datastates through DCP", "DCP")


def run(directory: Path, plan: Plan, *, large: bool, tiny: bool) -> Result:
    """Measure all systems in each layout for which the machine has enough GPUs, or enough cores without a GPU.

    Without a GPU only the ranks that restore need a core each, for nothing of the saves is measured.
    """
    result = Result()
    gpu = torch.cuda.is_available()
    kind: Kind = "tiny" if tiny else "large" if large else "usual"
    for layout, (saving, restoring, cut) in LAYOUTS.items():
        here, needed = (torch.cuda.device_count(), max(saving, restoring)) if gpu else (cores(), restoring)
        if needed > here and (gpu or not tiny):
            what = "GPU" if gpu else "core"
            result.settings[layout] = f"skipped: {needed} ranks need a {what} each, here are {here}"
            continue
        folder = directory / f"{saving}-ranks"
        with Team(saving, kind) as team:
            nbytes: int = team.call("nbytes")[0]
            where = {"directory": folder, "host_cache": _HOST_CACHE}
            paths = {system: team.call("save", system=system, **where)[0][1] for system in SYSTEMS}
        result.parameters = {"bytes": nbytes}
        with Team(restoring, kind, cut) as team:
            stored = raw.RawFiles(tuple(directory / f"raw-{i}" for i in range(restoring)), nbytes)
            modes = raw.reader_modes(stored, TRIED, restores=not gpu)  # a raw restore ends in host memory
            stored.run("write", modes["raw"])
            actions: dict[str, Callable[[], Sample]] = {}
            for name, mode in modes.items():
                actions[f"{name}, {layout}"] = partial(_raw, stored, raw.READERS[name], mode)
                result.settings[f"{name}, {layout}"] = f"{restoring} processes: {raw.in_words(mode)}"
            for system, path in paths.items():
                actions[f"{system}, {layout}"] = partial(_restored, team, system, path, where)
            interleave(result, actions, plan)
            result.settings.update(team.call("settings")[0])
            stored.remove()
        for path in paths.values():
            remove(path)
    return result


def _raw(stored: raw.RawFiles, operation: raw.Operation, mode: raw.Mode) -> Sample:
    for path in stored.paths:
        page_cache.drop(path)
    return {"read": stored.run(operation, mode)["seconds"]}


def _restored(team: Team, system: str, path: Path, where: dict[str, object]) -> Sample:
    page_cache.drop(path)
    return together(team.call("restore", system=system, path=path, **where))
