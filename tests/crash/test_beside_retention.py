"""Retention of one process beside readers, and beside the retention of others."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steps import OPTIONS, array_of, assert_holds, providers

import datastates as ds
from datastates._base import faults
from datastates.cli import commands
from datastates.commit.directory_tier import DirectoryTier
from datastates.commit.tier import Tier
from datastates.storage import Location


def save(root: Path, *steps: int, **options: Any) -> None:
    with ds.Checkpointer(root, **OPTIONS, **options) as ckpt:
        for step in steps:
            ckpt.snapshot(providers(step), step=step).wait_committed()


@pytest.fixture
def overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which step 1 is deleted, in favour of step 2, after a reader found it and before it holds it."""
    save(tmp_path, 1)
    real = DirectoryTier.protect
    waiting = [2]

    def protect(tier: Tier, path: Location) -> Any:
        while waiting:
            save(tmp_path, waiting.pop(), keep_last=1)
        return real(tier, path)

    monkeypatch.setattr(DirectoryTier, "protect", protect)
    return tmp_path


def opened(root: Path) -> Any:
    with ds.open(root) as checkpoint:
        return checkpoint["model/a"]


def restored(root: Path) -> Any:
    state = {"a": array_of(0)}
    ds.restore([ds.providers.HostTensorProvider("model", state)], root)
    return state["a"]


@pytest.mark.parametrize("read", [lambda root: ds.load(root)["model"]["a"], opened, restored])
def test_a_reader_takes_the_newer_one_where_the_one_it_found_is_deleted(
    read: Callable[[Path], Any], overtaken: Path
) -> None:
    assert np.array_equal(read(overtaken), array_of(2))


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_command_takes_the_newer_one_where_the_one_it_found_is_deleted(command: str, overtaken: Path) -> None:
    assert commands.main([command, str(overtaken)]) == 0


@pytest.mark.parametrize("point", [None, "store.rename"], ids=["before it is opened", "before it is renamed"])
def test_what_another_process_has_deleted_is_no_matter(
    point: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2, 3)
    real, outcomes = DirectoryTier.remove, []

    def remove(tier: Tier, path: Location) -> bool:
        if point is None:
            real(tier, path)
        else:
            faults.arm(faults.Fault(point, "fail", errno.ENOENT))
        outcomes.append(real(tier, path))
        return outcomes[-1]

    monkeypatch.setattr(DirectoryTier, "remove", remove)
    with caplog.at_level(logging.WARNING, "datastates"):
        save(tmp_path, 4, keep_last=1)
    # before the first snapshot 1 and 2, then all that are left
    assert outcomes == [True] * (3 if point is None else 5)
    assert not caplog.records
    if point is None:
        assert_holds(tmp_path, 4)


def test_the_pass_goes_on_behind_one_that_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2, 3)
    real = DirectoryTier.remove

    def remove(tier: Tier, path: Location) -> bool:
        if path.name == "step-00000001":
            faults.arm(faults.Fault("store.rename", "fail", errno.EACCES))
        return real(tier, path)

    monkeypatch.setattr(DirectoryTier, "remove", remove)
    save(tmp_path, 4, keep_last=1)
    faults.clear()
    assert_holds(tmp_path, 1, 4)
    assert [r.getMessage() for r in caplog.records if "could not be deleted" in r.getMessage()] != []
