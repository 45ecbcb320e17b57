"""Checkpoints that are told apart by their steps: saved slowly or in vain, and looked at."""

from __future__ import annotations

import errno
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np

import datastates as ds
from datastates import _native
from datastates._base import files
from datastates.commit import directories, manifest, retention
from datastates.providers import HostTensorProvider
from datastates.state.provider import StateProvider

OPTIONS: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}
SOURCES = "".join(map(inspect.getsource, (directories, files, manifest, retention)))
OPERATIONS = sorted(set(re.findall(r'\bsyscall\("(\w+)"', SOURCES)))
"""The system calls on a checkpoint's files that have fault points."""
SLOW = 1500
"""Milliseconds by which a test holds a snapshot up."""
PRELUDE = """
import os, signal, sys, time
import numpy as np
import datastates as ds
from datastates import _native
from datastates.providers import HostTensorProvider
root = sys.argv[1]
OPTIONS = dict(host_cache="4MiB", block="1MiB")
def providers(step):
    return [HostTensorProvider("model", {"a": np.full(100_000, step, np.float64)})]
"""
"""Begins a script that saves the same in a process of its own: its argument is the directory."""


def array_of(step: int) -> Any:
    return np.full(100_000, step, np.float64)


def providers(step: int) -> list[StateProvider]:
    return [HostTensorProvider("model", {"a": array_of(step)})]


def assert_holds(root: Path, *steps: int) -> None:
    committed = directories.committed(root)
    assert list(committed) == list(steps)
    for step, path in committed.items():
        assert np.array_equal(ds.load(path)["model"]["a"], array_of(step))


def hold_up_syncs(count: int = 1) -> None:
    """Make each snapshot slow to persist; its capture is quick."""
    _native.arm_fault("sync", "delay", SLOW, 1, count)


def fail_one(ckpt: ds.Checkpointer, step: int) -> ds.Snapshot:
    """A snapshot that has failed in the background, which nobody has asked about."""
    _native.arm_fault("sync", "fail", errno.EIO, 1, 1)
    snapshot = ckpt.snapshot(providers(step), step=step)
    ckpt.wait()
    _native.clear_faults()
    return snapshot
