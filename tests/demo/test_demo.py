"""The demonstration tells its whole story, and each of its models learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from datastates.demo.__main__ import STEPS, train
from datastates.demo.numpy_network import NumpyNetwork


@pytest.mark.by_hand
def test_the_story(tmp_path: Path) -> None:
    command, environment = (
        [sys.executable, "-m", "datastates.demo"],
        {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Resumed at step 20; all {STEPS} losses equal to the last bit" in done.stdout
    assert "partial" in done.stdout  # what the killed process left
    assert list(tmp_path.glob("datastates-demo-*")) == []


def test_the_network_without_torch_learns(tmp_path: Path) -> None:
    trained = train(NumpyNetwork(), tmp_path)
    first, *_, last = map(float.fromhex, trained.losses.values())
    assert last < first - 0.5
    assert len(trained.losses) == STEPS
