"""Checkpoints whose contents tell their step, with ways to save them slowly, to fail them and to check them."""

from __future__ import annotations

import errno
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np

import datastates as ds
from datastates import _native
from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.providers import HostTensorProvider
from datastates.state.provider import StateProvider
from datastates.storage import local, local_files

OPTIONS: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}
OTHERS = {"link", "readlink", "rmdir", "share", "statvfs", "utime"}  # no training loop calls these
_SOURCE = inspect.getsource(local) + inspect.getsource(local_files)
OPERATIONS = sorted({"unlock", *re.findall(r'call\("(\w+)"', _SOURCE)} - OTHERS)
"""The system calls on a checkpoint's files that have fault points."""
PRELUDE = f"""
import os, signal, sys, time
import numpy as np
import datastates as ds
from datastates import _native
from datastates.providers import HostTensorProvider
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from hold import END, held, hold_until_exit
root = sys.argv[1]
OPTIONS = dict(host_cache="4MiB", block="1MiB")
def providers(step):
    return [HostTensorProvider("model", {{"a": np.full(100_000, step, np.float64)}})]
"""
"""The beginning of a script that saves the same state in another process. Its argument is the directory."""


def array_of(step: int) -> Any:
    return np.full(100_000, step, np.float64)


def providers(step: int) -> list[StateProvider]:
    return [HostTensorProvider("model", {"a": array_of(step)})]


def assert_holds(root: Path, *steps: int) -> None:
    committed = newest.committed(tier_of(root))
    assert list(committed) == list(steps)
    for step, path in committed.items():
        assert np.array_equal(ds.load(path)["model"]["a"], array_of(step))


def fail_one(ckpt: ds.Checkpointer, step: int) -> ds.Snapshot:
    """Take a snapshot that fails in the background, and ask nothing about its failure."""
    _native.arm_fault("sync", "fail", errno.EIO, 1, 1)
    snapshot = ckpt.snapshot(providers(step), step=step)
    ckpt.wait()
    _native.clear_faults()
    return snapshot
