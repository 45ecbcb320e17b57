"""The snapshot taken last is the newest, whatever its step: after a roll-back, and beside some without a sequence."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steps import OPTIONS, array_of, assert_holds, providers

import datastates as ds
from datastates._base import faults
from datastates.commit import manifest, newest, retention, run
from datastates.commit.tiers import tier_of
from datastates.errors import FormatError, StorageError
from datastates.kept import Keep


def save(root: Path, *steps: int, **options: Any) -> None:
    with ds.Checkpointer(root, **OPTIONS, **options) as ckpt:
        for step in steps:
            ckpt.snapshot(providers(step), step=step).wait_committed()


def restored_newest(root: Path) -> int | None:
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        restored = ckpt.restore(providers(0))
        step = restored.step if restored else None
        assert step == ckpt.latest()
    return step


def without_sequence(path: Path) -> None:
    """Make the manifest one of format 1."""
    made = manifest.open(path).model_copy(update={"format": 1, "sequence": None})
    (path / manifest.FILE).write_bytes(manifest.encode(made))


def test_a_roll_back_lasts(tmp_path: Path) -> None:
    save(tmp_path, 80, 100)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.restore(providers(0), step=80)
        for step in (85, 90):
            ckpt.snapshot(providers(step), step=step)
    assert restored_newest(tmp_path) == 90
    assert np.array_equal(ds.load(tmp_path)["model"]["a"], array_of(90))
    assert_holds(tmp_path, 80, 85, 90, 100)


def test_a_step_saved_again_after_a_roll_back_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 80, 100)
    save(tmp_path, 80)
    assert restored_newest(tmp_path) == 80


def test_retention_keeps_those_that_were_taken_last(tmp_path: Path) -> None:
    save(tmp_path, 80, 100, 120)
    save(tmp_path, 85, keep_last=2)
    assert_holds(tmp_path, 85, 120)
    save(tmp_path, 90, keep_last=2)
    assert_holds(tmp_path, 85, 90)


def test_another_process_in_the_directory_counts(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as early:
        early.snapshot(providers(7), step=7).wait_committed()
        save(tmp_path, 8, 9)
        early.snapshot(providers(5), step=5).wait_committed()
        assert early.latest() == 5


def test_single_snapshots_count(tmp_path: Path) -> None:
    for step in (20, 10):
        ds.snapshot(providers(step), tmp_path / f"step-{step:08d}", step=step, **OPTIONS).wait_committed()
    assert restored_newest(tmp_path) == 10


def test_checkpoints_without_a_sequence_are_older_and_in_the_order_of_their_steps(tmp_path: Path) -> None:
    save(tmp_path, 100, 80)
    for path in newest.committed(tier_of(tmp_path)).values():
        without_sequence(path)
    assert restored_newest(tmp_path) == 100
    save(tmp_path, 85)
    assert restored_newest(tmp_path) == 85
    assert list(newest.by_age(tier_of(tmp_path))) == [80, 100, 85]


def test_a_damaged_manifest_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 80, 100, 85)
    (tmp_path / "step-00000085" / manifest.FILE).write_bytes(b"damaged")
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt, pytest.raises(FormatError, match="step-00000085"):
        ckpt.restore(providers(0))


def test_an_old_damaged_manifest_is_in_nobodys_way(tmp_path: Path) -> None:
    save(tmp_path, 80, 100)
    (tmp_path / "step-00000080" / manifest.FILE).write_bytes(b"damaged")
    os.utime(tmp_path / "step-00000080", ns=(0, 0))  # otherwise both may have the same time
    assert restored_newest(tmp_path) == 100
    save(tmp_path, 90)
    assert restored_newest(tmp_path) == 90


def test_a_manifest_that_cannot_be_read_for_a_moment_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    """Its place is then a guess by the time of its directory, which two commits may share."""
    save(tmp_path, 80, 100)
    for path in tmp_path.glob("step-*"):
        os.utime(path, ns=(0, 0))
    for nth in (1, 2):
        for restored in (
            lambda: restored_newest(tmp_path),
            lambda: ds.load(tmp_path)["model"]["a"][0],
            lambda: ds.restore(providers(0), tmp_path, fallback=True).step,
        ):
            manifest.facts_of.cache_clear()
            faults.arm(faults.Fault("store.read", "fail", errno.EIO, nth))
            assert restored() == 100


def test_nor_for_the_newest_of_its_step(tmp_path: Path) -> None:
    older, newer = tmp_path / "step-00000080", tmp_path / "step-00000080.r1"
    for path in (older, newer):
        ds.snapshot(providers(80), path, step=80, **OPTIONS).wait_committed()
    for path in tmp_path.glob("step-*"):
        os.utime(path, ns=(0, 0))
    for nth in (1, 2):
        manifest.facts_of.cache_clear()
        faults.arm(faults.Fault("store.read", "fail", errno.EIO, nth))
        assert newest.find(newest.given(tmp_path, is_checkpoint=False), 80) == newer


def test_a_manifest_that_may_be_the_newest_and_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 80, 100)
    for path in tmp_path.glob("step-*"):
        os.utime(path, ns=(0, 0))
    manifest.facts_of.cache_clear()
    read = manifest.open

    def fail(path: Path) -> Any:
        if path.name == "step-00000080":
            raise StorageError(errno.EIO, "read", str(path))
        return read(path)

    monkeypatch.setattr(manifest, "open", fail)
    with pytest.raises(StorageError, match="step-00000080"):
        ds.load(tmp_path)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        assert ckpt.restore(providers(0), fallback=True).step == 100


def test_nothing_is_deleted_by_a_guess(tmp_path: Path) -> None:
    save(tmp_path, 80, 100)
    for path in tmp_path.glob("step-*"):
        os.utime(path, ns=(0, 0))
    manifest.facts_of.cache_clear()
    faults.arm(faults.Fault("store.read", "fail", errno.EIO))
    with pytest.raises(StorageError, match="step-00000080"):
        retention.outdated(tier_of(tmp_path), Keep(last=1))
    assert retention.outdated(tier_of(tmp_path), Keep(last=1)) == [tmp_path / "step-00000080"]


@pytest.mark.parametrize("clock", ["goes", "stands still"])
def test_a_manifest_that_cannot_be_read_counts_for_the_next_number(
    clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if clock == "stands still":
        monkeypatch.setattr(run, "clock", lambda: 0)
    save(tmp_path, 80, 100)
    numbers = [manifest.open(tmp_path / f"step-{step:08d}").sequence or 0 for step in (80, 100)]
    manifest.facts_of.cache_clear()
    faults.arm(faults.Fault("store.read", "fail", errno.EIO, nth=2))
    with run.Order(tier_of(tmp_path)).sequence(0, lambda: None) as number:
        assert number > max(numbers)
    assert run.next_sequence(tier_of(tmp_path)) == max(numbers) + 1


@pytest.mark.long
def test_a_roll_back_of_several_ranks_lasts(tmp_path: Path, ranks: Callable[..., Any]) -> None:
    script = """
    import os, sys
    import numpy as np
    import datastates as ds
    from datastates.providers import HostTensorProvider

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = dict(rank=rank, world_size=size, host_cache="4MiB", block="1MiB")

    def providers(step):
        return [HostTensorProvider(f"model{rank}", {"a": np.full(1000, step, np.float64)})]

    for steps in [(80, 100), (85,)]:
        with ds.Checkpointer(sys.argv[1], **options) as ckpt:
            for step in steps:
                ckpt.snapshot(providers(step), step=step).wait_committed()
    with ds.Checkpointer(sys.argv[1], **options) as ckpt:
        assert ckpt.restore(providers(0)).step == ckpt.latest() == 85
    """
    ranks(2, script, tmp_path / "run")
