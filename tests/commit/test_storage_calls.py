"""The number of storage calls does not grow with the checkpoints that are kept, and what others change is seen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_json

import datastates as ds
from datastates.commit import manifest, newest, run
from datastates.commit.tiers import tier_of
from datastates.providers import HostTensorProvider
from datastates.storage import Location
from datastates.storage.local import LocalStore

OPTIONS = {"host_cache": "2MiB", "block": "1MiB"}
FEW, MANY = 11, 31


def providers(value: float = 0.0) -> list[HostTensorProvider]:
    return [HostTensorProvider("model", {"a": np.full(10, float(value))})]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The storage calls so far."""
    made: list[str] = []
    real = LocalStore._call

    def call(store: LocalStore, operation: str, path: Location, point: str = "") -> Any:
        made.append(f"{operation} {path}")
        return real(store, operation, path, point)

    monkeypatch.setattr(LocalStore, "_call", call)
    return made


Act = Callable[[ds.Checkpointer, int], object]


def snapshot(ckpt: ds.Checkpointer, step: int) -> None:
    ckpt.snapshot(providers(step), step=step, metric=step % 7).wait_committed()
    ckpt.wait()


def restore(ckpt: ds.Checkpointer, step: int) -> None:
    restored = ckpt.restore(providers())
    assert restored is not None
    assert restored.step == step - 1


def load(ckpt: ds.Checkpointer, step: int) -> None:
    assert ds.load(ckpt.directory, **OPTIONS)["model"]["a"][0] == step - 1


ACTS: dict[str, tuple[Act, float]] = {
    "snapshot": (snapshot, 0.0),
    "restore": (restore, 1.0),
    "load": (load, 1.0),
    "latest": (lambda ckpt, _: ckpt.latest(), 1.0),
    "steps": (lambda ckpt, _: ckpt.steps(), 1.0),
}


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"keep_last": 3, "keep_best": 3, "keep_every": 1}], ids=["all", "every"])
@pytest.mark.parametrize("act", ACTS)
def test_calls_for_each_kept_checkpoint(act: str, options: dict[str, int], calls: list[str], tmp_path: Path) -> None:
    do, most = ACTS[act]
    counts = []
    with ds.Checkpointer(tmp_path, **OPTIONS, **options) as ckpt:
        for kept in (FEW, MANY):
            for step in range(len(list(tmp_path.glob("step-*"))), kept):
                snapshot(ckpt, step)
            calls.clear()
            do(ckpt, kept)
            counts.append(len(calls))
            said = calls.copy()
    assert counts[1] - counts[0] <= most * (MANY - FEW), "\n".join(sorted(said))


def test_calls_of_a_list(calls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows what each manifest says, and the lengths of the files."""
    counts = []
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        for kept in (FEW, MANY):
            for step in range(len(list(tmp_path.glob("step-*"))), kept):
                snapshot(ckpt, step)
            run_json(capsys, "ls", tmp_path)
            calls.clear()
            assert len(run_json(capsys, "ls", tmp_path)[1]["checkpoints"]) == kept
            counts.append(len(calls))
    assert counts[1] - counts[0] <= 3 * (MANY - FEW)


# --- what others change while a checkpointer is open


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of another directory, with a sequence number above those of the tests."""
    with monkeypatch.context() as ahead, ds.Checkpointer(tmp_path / "other", keep_last=1, **OPTIONS) as ckpt:
        ahead.setattr(run, "clock", lambda: 1 << 60)
        snapshot(ckpt, 3)
    (path,) = (tmp_path / "other").iterdir()
    return path


def copied(root: Path, other: Path) -> None:
    shutil.copytree(other, root / "step-00000009")


def replaced(root: Path, other: Path) -> None:
    shutil.rmtree(root / "step-00000002")
    shutil.copytree(other, root / "step-00000002")


def replaced_inside(root: Path, other: Path) -> None:
    """The directory stays the same one."""
    for file in other.iterdir():
        shutil.copy(file, root / "step-00000002" / file.name)


def renamed(root: Path, other: Path) -> None:
    (root / "step-00000001").rename(root / "step-00000000")
    shutil.copytree(other, root / "step-00000001")


def linked(root: Path, other: Path) -> None:
    shutil.rmtree(root / "step-00000003")
    (root / "step-00000003").symlink_to(other)


@pytest.mark.parametrize("change", [copied, replaced, replaced_inside, renamed, linked])
def test_what_others_put_there_is_seen(change: Callable[[Path, Path], None], other: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        for step in (1, 2, 3):
            snapshot(ckpt, step)
        before = set(newest.committed(tier_of(Location(root))).values())
        change(root, other)
        assert ckpt.latest() == next(reversed(newest.by_age(tier_of(Location(root)))))
        restore_here = ckpt.restore(providers())
        assert restore_here is not None
        assert restore_here.step == 3, "as the manifest says"
        snapshot(ckpt, 4)
        assert ckpt.latest() == 4, "what was saved last is the newest"
        made = manifest.open(Location(root / "step-00000004"))
        assert made.sequence is not None
        assert made.sequence > (manifest.open(Location(other)).sequence or 0)
    assert before


def test_what_others_delete_is_seen(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, keep_last=2, **OPTIONS) as ckpt:
        for step in (1, 2, 3):
            snapshot(ckpt, step)
        shutil.rmtree(tmp_path / "step-00000003")
        assert (ckpt.latest(), ckpt.steps()) == (2, [2])
        snapshot(ckpt, 4)
        assert ckpt.steps() == [2, 4], "so many are kept that are there"


def test_another_checkpointer_commits_and_deletes(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as one, ds.Checkpointer(tmp_path, keep_last=2, **OPTIONS) as two:
        for step in range(1, 9):
            snapshot(two if step % 3 == 0 else one, step)
            assert one.latest() == two.latest() == step
            assert one.steps() == two.steps()
        sequences = [manifest.open(path).sequence for path in newest.committed(tier_of(Location(tmp_path))).values()]
    assert sequences == sorted({*sequences})


def test_of_many_checkpoints_one_that_is_changed_inside_is_seen_after_some_snapshots(
    other: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    with ds.Checkpointer(root, **OPTIONS) as ckpt:
        for step in range(12, 24):
            snapshot(ckpt, step)
        shutil.copytree(root / "step-00000012", root / "step-00000002")
        snapshot(ckpt, 24)
        replaced_inside(root, other)
        for step in (25, 26):
            snapshot(ckpt, step)
        assert ckpt.latest() == 26
