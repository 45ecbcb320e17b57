"""A step that was moved to other storage and linked: found and restored, and never deleted through the link."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from command import run, run_json
from steps import OPTIONS, assert_holds, providers

import datastates as ds
from datastates.commit import directory_tier, newest
from datastates.commit.tiers import tier_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of steps 1 to 3; step 1 lies elsewhere."""
    root = tmp_path / "run"
    with ds.Checkpointer(root, **OPTIONS) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.snapshot(providers(step), step=step).wait_committed()
    move(root, 1)
    return root


def move(root: Path, step: int) -> Path:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    step_folder = root / f"step-{step:08d}"
    step_folder.rename(elsewhere / step_folder.name)
    step_folder.symlink_to(elsewhere / step_folder.name)
    return elsewhere / step_folder.name


def test_a_linked_step_is_a_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_holds(root, 1, 2, 3)
    assert [one["step"] for one in run_json(capsys, "ls", root)[1]["checkpoints"]] == [1, 2, 3]
    assert run(capsys, "verify", root / "step-00000001")[0] == 0
    move(root, 3)
    with ds.Checkpointer(root, **OPTIONS) as checkpointer:
        assert checkpointer.latest() == 3
        restored = checkpointer.restore(providers(0))
    assert restored is not None
    assert restored.step == 3


def test_nothing_is_deleted_through_a_link(root: Path) -> None:
    moved = root.parent / "elsewhere" / "step-00000001"
    with ds.Checkpointer(root, keep_last=1, **OPTIONS) as checkpointer:
        checkpointer.snapshot(providers(4), step=4).wait_committed()
        assert_holds(root, 1, 4)
        checkpointer.snapshot(providers(1), step=1).wait_committed()  # supersedes what lies elsewhere
    assert sorted(one.name for one in root.iterdir()) == ["step-00000001", "step-00000001.r1"]
    assert (root / "step-00000001").is_symlink()
    assert sorted(one.name for one in moved.iterdir()) == ["manifest.json", "rank-00000.pt"]


def test_a_linked_step_does_not_count_towards_keep_last(root: Path) -> None:
    move(root, 3)  # the newest
    with ds.Checkpointer(root, keep_last=2, **OPTIONS) as checkpointer:
        checkpointer.snapshot(providers(4), step=4).wait_committed()
    assert_holds(root, 1, 2, 3, 4)


def test_a_link_with_the_name_of_debris_is_left_alone(root: Path) -> None:
    kept = root.parent / "kept"
    kept.mkdir()
    (kept / "precious").write_text("")
    (root / "step-00000009.partial-00000000").symlink_to(kept)
    with ds.Checkpointer(root, **OPTIONS):
        pass
    assert tier_of(root).debris() == []
    assert (kept / "precious").exists()


@pytest.mark.parametrize("target", ["gone", "empty", "step-00000007"], ids=["nothing", "an unmounted folder", "itself"])
def test_a_link_that_leads_nowhere_is_told(
    target: str, root: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (root.parent / "empty").mkdir()
    (root / "step-00000007").symlink_to(target if target.startswith("step") else root.parent / target)
    directory_tier._warn_of_link.cache_clear()
    with caplog.at_level(logging.WARNING, "datastates"), ds.Checkpointer(root, **OPTIONS) as checkpointer:
        restored = checkpointer.restore(providers(0))
        assert checkpointer.steps() == [1, 2, 3]
        checkpointer.snapshot(providers(7), step=7).wait_committed()
    assert restored is not None
    assert restored.step == 3
    told = [one.getMessage() for one in caplog.records if "passed over" in one.getMessage()]
    assert told == [
        f"{root / 'step-00000007'} is passed over: it is a link to {os.readlink(root / 'step-00000007')}, "
        "where no checkpoint is"
    ]
    assert run_json(capsys, "ls", root)[1]["without_manifest"] == ["step-00000007"]
    assert newest.committed(tier_of(root))[7].name == "step-00000007.r1"
