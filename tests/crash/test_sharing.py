"""Kills and failures while a checkpoint shares what has not changed: what was committed stays whole, and alone."""

from __future__ import annotations

import errno
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reflinks
from short import first

import datastates as ds
from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.formats.own import verify_container
from datastates.providers import HostTensorProvider
from datastates.reading.every_container import open_checkpoint

LOOP = f"""
import os, sys
import numpy as np
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(reflinks.__file__).parent)!r}]
import reflinks, test_sharing
import datastates as ds
reflinks.emulate()
root = sys.argv[1]
with ds.Checkpointer(root, incremental=True, keep_last=2, host_cache="2MiB", block="1MiB") as ckpt:
    state = test_sharing.state_of(0)
    restored = ckpt.restore(test_sharing.providers_of(state))
    begin = restored.step + 1 if restored else 0
    for step in range(begin, begin + 4):
        for key, array in test_sharing.state_of(step).items():
            state[key][...] = array
        taken = ckpt.snapshot(test_sharing.providers_of(state), step=step)
        try:
            taken.wait_committed()
        except ds.DatastatesError as error:
            print(step, "failed", flush=True)
            continue
        print(step, taken.report.executor["shared"], flush=True)
"""
"""A loop that saves four steps, and prints how many bytes each commit shares. Each step but the first shares."""


def state_of(step: int) -> dict[str, Any]:
    """A frozen array, one with two rows that change, one that changes, and a small one."""
    rows = np.arange(300_000.0)
    rows[[70_000, 200_000]] += step
    return {
        "frozen": np.arange(400_000.0),
        "rows": rows,
        "changes": np.full(50_000, step, np.float64),
        "small": np.full(7, step),
    }


def providers_of(state: dict[str, Any]) -> list[ds.StateProvider]:
    return [HostTensorProvider("state", state, lazy=True)]


def audited(root: Path) -> list[int]:
    """The committed steps, each of which is compared with its state, and each byte with its checksum."""
    committed = newest.committed(tier_of(root))
    for step, path in committed.items():
        _, containers = open_checkpoint(path)
        assert [p for c in containers for p in verify_container(c, lambda _: None)] == []
        found = ds.load(path)["state"]
        assert all(np.array_equal(found[key], array) for key, array in state_of(step).items())
    return list(committed)


def shared_by(lines: str) -> list[int]:
    return [int(shared) for _, shared in map(str.split, lines.splitlines())]


KILLS = [
    *(f"store.share=kill@{nth}" for nth in (2, 1, 3, 6)),
    *(f"write=kill@{nth}" for nth in (5, 6, 7, 8)),
    *(f"{point}=kill@{nth}" for point in ("open", "allocate", "sync", "close") for nth in (2, 3)),
    *(f"store.{point}=kill@{nth}" for point in ("open", "rename", "sync_directory") for nth in (2, 3)),
]


def killed_and_resumed(loop: str, fault: str, root: Path, run: Callable[..., Any]) -> tuple[list[int], list[bool]]:
    """Kill a loop, and run it again with its newest checkpoint alone.

    Returns the steps that were committed before the kill, and whether each step after it shares.
    """
    ended = run("-c", loop, root, DATASTATES_FAULTS=fault)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    committed, announced = audited(root), shared_by(ended.stdout)
    assert max(committed, default=-1) >= len(announced) - 1
    for step in committed[:-1]:  # each stands alone
        shutil.rmtree(root / f"step-{step:08d}")
    again = run("-c", loop, root)
    assert again.returncode == 0, again.stderr
    last = max(committed, default=-1) + 4
    assert audited(root) == [last - 1, last]
    assert tier_of(root).debris() == []
    return committed, [shared > 3_000_000 for shared in shared_by(again.stdout)]


@pytest.mark.parametrize("fault", first(KILLS, rest=pytest.mark.by_hand))
def test_killed_while_it_shares(fault: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    committed, shares = killed_and_resumed(LOOP, fault, tmp_path, run)
    # what was restored is a base, and so is each step after it
    assert shares == [bool(committed), True, True, True]


REFUSALS = ["EINVAL", "EXDEV", "EOPNOTSUPP", "EMLINK", "EPERM", "ENOSPC", "EDQUOT", "EIO"]


@pytest.mark.parametrize("name", first(REFUSALS, rest=pytest.mark.by_hand))
def test_what_storage_refuses_to_share_is_written(name: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    fault = f"store.share=fail:{getattr(errno, name)}@2"  # one range is shared then
    ended = run("-c", LOOP, tmp_path, DATASTATES_FAULTS=fault)
    assert ended.returncode == 0, ended.stderr
    assert [shared > 0 for shared in shared_by(ended.stdout)] == [False, False, True, True]
    assert audited(tmp_path) == [2, 3]
    assert tier_of(tmp_path).debris() == []
