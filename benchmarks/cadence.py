"""Compare the interval that ``every="auto"`` chooses with the best one of a failure simulator.

What a snapshot costs is measured: as training waits for it, and as a loop would wait that saves until it is durable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

import datastates as ds
from datastates.providers import from_state_dict
from datastates.schedule.due import best_interval
from failure_model import Setting, best, lives, useful
from measure import Plan, Result, Sample, interleave

MTBF = {"1 h": 3600.0, "6 h": 21600.0, "7 d": 604800.0}
RESTART = 120.0
FAILURES = 20_000


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure a snapshot in each round, and simulate jobs whose snapshots cost so much."""
    nbytes = 8 << 20 if tiny else 512 << 20
    result = Result(
        parameters={"bytes": nbytes, "failures": FAILURES, "restart": int(RESTART)},
        settings={
            "datastates": 'every="auto" with the named time between failures',
            "datastates, waiting": "the same, for a loop that waits until each snapshot is durable",
        },
    )
    state = {f"weight.{i}": torch.ones(nbytes // 8 // 4) for i in range(8)}
    with contextlib.closing(ds.Checkpointer(directory, keep_last=1)) as checkpointer:
        seeds = iter(range(1, 1_000_000))
        actions = {
            f"datastates{', waiting' * waits}, {name}": partial(_sample, checkpointer, state, mtbf, seeds, waits=waits)
            for waits in (False, True)
            for name, mtbf in MTBF.items()
        }
        interleave(result, actions, plan)
    return result


def _sample(
    checkpointer: ds.Checkpointer, state: dict[str, torch.Tensor], mtbf: float, seeds: Iterator[int], *, waits: bool
) -> Sample:
    seed = next(seeds)
    snapshot = checkpointer.snapshot([from_state_dict("model", state)], step=seed)
    snapshot.wait_committed()
    report = snapshot.report
    assert report.commit_seconds is not None
    cost = report.commit_seconds if waits else report.stall_seconds
    setting = Setting(cost, report.commit_seconds, mtbf, RESTART)
    times = lives(mtbf, FAILURES, seed)
    chosen, optimum = best_interval(cost, mtbf, report.commit_seconds), best(setting, times)
    return {
        "cost": cost,
        "durable": report.commit_seconds,
        "interval": chosen,
        "best": optimum,
        "useful": useful(setting, chosen, times),
        "most": useful(setting, optimum, times),
    }
