"""A full disk: what need not be kept goes before a snapshot, and the error says what is needed, free and could go."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from steps import OPTIONS, assert_holds, providers

import datastates as ds
from datastates import _native
from datastates.commit import retention
from datastates.commit.tiers import tier_of
from datastates.errors import StorageError
from datastates.providers import HostTensorProvider
from datastates.storage import Location


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 22 MB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=22000k", "none", tmp_path]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def large(step: int) -> list[HostTensorProvider]:
    return [HostTensorProvider("model", {"a": np.full(600_000, float(step))})]


def test_what_need_not_be_kept_goes_before_the_first_snapshot(disk: Path) -> None:
    root = disk / "run"
    with ds.Checkpointer(root, on_error="warn", **OPTIONS) as ckpt:
        for step in range(1, 5):
            ckpt.snapshot(large(step), step=step).wait_committed()
        with pytest.raises(StorageError) as caught:
            ckpt.snapshot(large(5), step=5).wait_committed()
        assert caught.value.errno == errno.ENOSPC
        text = str(caught.value)
        assert "; the file needs 4.8" in text
        assert f" are free in {root}. 3 older checkpoints (14.4 MB) could go: delete them, or set keep_last" in text
    with ds.Checkpointer(root, keep_last=2, **OPTIONS) as ckpt:
        assert ckpt.steps() == [1, 2, 3, 4], "who only reads deletes nothing"
        for step in (5, 6):
            ckpt.snapshot(large(step), step=step).wait_committed()
        assert ckpt.steps() == [5, 6]


def fill(root: Path) -> None:
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        for step in range(1, 6):
            ckpt.snapshot(providers(step), step=step).wait_committed()


def test_the_newest_whole_one_and_what_was_restored_stay(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "step-00000005" / "rank-00000.pt").write_bytes(b"damaged")
    with ds.Checkpointer(tmp_path, keep_last=1, on_error="warn", **OPTIONS) as ckpt:
        assert ckpt.restore(providers(0), step=2).step == 2
        _native.arm_fault("write", "fail", errno.ENOSPC, 1, 1)
        with pytest.raises(StorageError, match="No space left"):
            ckpt.snapshot(providers(6), step=6).wait_committed()
        _native.clear_faults()
        assert ckpt.steps() == [2, 4, 5]
        ckpt.snapshot(providers(7), step=7).wait_committed()
    assert_holds(tmp_path, 7)


def test_what_need_not_be_kept_goes_when_the_disk_is_full(tmp_path: Path) -> None:
    """As what another process read when it was to be deleted."""
    with ds.Checkpointer(tmp_path, keep_last=1, on_error="warn", **OPTIONS) as ckpt:
        ckpt.snapshot(providers(1), step=1).wait_committed()
        with tier_of(Location(tmp_path)).protect(Location(tmp_path / "step-00000001")):
            ckpt.snapshot(providers(2), step=2).wait_committed()
        assert ckpt.steps() == [1, 2]
        _native.arm_fault("write", "fail", errno.ENOSPC, 1, 1)
        with pytest.raises(StorageError, match=r"\. 1 older checkpoint, which need not be kept, was deleted"):
            ckpt.snapshot(providers(3), step=3).wait_committed()
        assert ckpt.steps() == [2]


def test_nothing_goes_where_the_settings_keep_all(tmp_path: Path) -> None:
    fill(tmp_path)
    with ds.Checkpointer(tmp_path, keep_last=2, keep_every=1, on_error="warn", **OPTIONS) as ckpt:
        _native.arm_fault("write", "fail", errno.ENOSPC, 1, 1)
        with pytest.raises(
            StorageError, match=r"4 older checkpoints .* could go: .* keep fewer by keep_best, keep_every and keep_last"
        ):
            ckpt.snapshot(providers(6), step=6).wait_committed()
        assert ckpt.steps() == [1, 2, 3, 4, 5]
    assert retention.older(tier_of(Location(tmp_path))) == [
        Location(tmp_path / f"step-{step:08}") for step in range(1, 5)
    ]
