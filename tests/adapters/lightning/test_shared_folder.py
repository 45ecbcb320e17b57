"""Several runs save into one folder: no run takes what another is writing for debris."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from datastates.commit.pending import Pending

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")
STATE = {"state_dict": {"w": torch.arange(1 << 18)}}


def test_a_checkpoint_under_way_survives_another_runs_first_save(
    training: ModuleType, io: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    io.files.begin()
    io.files.put(io.files.transaction("what comes before", lambda _: go.wait()))
    io.save_checkpoint(STATE, tmp_path / "one.ckpt")  # it gets its name only after that
    other = training.DataStatesCheckpointIO(**training.OPTIONS)
    other.save_checkpoint(STATE, tmp_path / "other.ckpt")
    other.teardown()
    assert (tmp_path / "other.ckpt").exists()
    go.set()
    io.teardown()
    assert {path.name for path in tmp_path.iterdir()} == {"one.ckpt", "other.ckpt"}
    assert caplog.messages == []


def test_what_a_run_left_is_removed_once_its_lock_is_gone(io: Any, tmp_path: Path) -> None:
    alive = Pending(tmp_path / ".alive.ckpt").begin()
    dead = Pending(tmp_path / ".dead.ckpt").begin()
    dead.file("dead.ckpt").write_bytes(b"half")
    dead.close()
    io.save_checkpoint(STATE, tmp_path / "new.ckpt")
    io.teardown()
    assert {path.name for path in tmp_path.iterdir()} == {alive.directory.name, "new.ckpt"}
    alive.abandon()
