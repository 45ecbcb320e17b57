"""The benchmarks of each suite, in the order in which they run."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cadence
import call
import capture
import copies
import durable
import export
import files
import index
import loading
import lora
import machine
import memory
import ranks
import reshard
import restore
import scale
import training
import write
from measure import Plan, Result
from tables import medians

Benchmark = Callable[..., Result]


def _meshes(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    import meshes  # needs JAX, which a machine for the other suites may lack

    return meshes.run(directory, plan, tiny=tiny)


def _buckets(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    import buckets  # needs obstore and a server

    return buckets.run(directory, plan, tiny=tiny)


def _drains(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    import drains  # needs obstore and a server

    return drains.run(directory, plan, tiny=tiny)


SUITES: dict[str, dict[str, Benchmark]] = {
    "cpu": {
        "write": write.run,
        "restore-cold": partial(restore.run, files="cold"),
        "restore-first": partial(restore.run, files="cold, first"),
        "restore-warm": partial(restore.run, files="cached"),
        "call": call.run,
        "throughput": training.run_cpu,
        "memory": memory.run,
        "index": index.run,
        "files": files.run,
        "export": export.run,
        "buckets": _buckets,
        "drains": _drains,
        "copies-tmpfs": copies.run,
        "ranks": ranks.run,
        "reshard": partial(reshard.run, large=False),
        "reshard-large": partial(reshard.run, large=True),
        "meshes": _meshes,
        "cadence": cadence.run,
        "lora": lora.run,
    },
    "gpu": {
        "capture": capture.run,
        "training": training.run_gpu,
        "durable": partial(durable.run, tmpfs=False),
        "durable-tmpfs": partial(durable.run, tmpfs=True),
        "load-tmpfs": partial(loading.run, cold=False),
        "load-cold": partial(loading.run, cold=True),
        "copies-tmpfs": copies.run,
        "ranks": ranks.run,
        "reshard-large": partial(reshard.run, large=True),
    },
    "scale": scale.Scale().suite(),
}


def run_suite(
    suite: str, directory: Path, *, tiny: bool, only: Sequence[str] | None, repeat: int, until: float
) -> Iterator[dict[str, Any]]:
    """Run the benchmarks of a suite and yield the report after each; prints medians as they come.

    Args:
        suite: The suite's name.
        directory: An empty directory for the files.
        tiny: Whether to use a few MB instead of GB.
        only: Names of the benchmarks to run; None for all.
        repeat: Number of rounds.
        until: Moment of the monotonic clock after which no further round begins.
    """
    benchmarks = {name: run for name, run in SUITES[suite].items() if only is None or name in only}
    unknown = set(only or ()) - set(SUITES[suite])
    if unknown:
        raise SystemExit(f"no benchmark of the {suite} suite: {', '.join(sorted(unknown))}")
    if suite == "gpu" and not torch.cuda.is_available():
        raise SystemExit("the gpu suite needs a CUDA device")
    report: dict[str, Any] = {
        "suite": suite,
        "tiny": tiny,
        "repeat": repeat,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.describe(directory),
        "benchmarks": {},
    }
    for name, run in benchmarks.items():
        print(f"{name} …", flush=True)
        begin = time.monotonic()
        parent = durable.TMPFS if name.endswith("-tmpfs") else directory
        try:
            with tempfile.TemporaryDirectory(dir=parent, prefix=f"{name}-") as folder:
                result = run(Path(folder), Plan(repeat, until), tiny=tiny)
        except Exception as error:  # the other benchmarks run all the same
            result = Result()
            result.fail(name, error)
        report["benchmarks"][name] = asdict(result) | {"seconds": time.monotonic() - begin}
        print(medians(report["benchmarks"][name]), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield report
