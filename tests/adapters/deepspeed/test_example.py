"""The example of the documentation: killed in the middle of a write, it resumes with the losses of one run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "deepspeed" / "train.py"
STEPS, EVERY, DIE_AT = 8, 2, 6


@pytest.mark.by_hand
@pytest.mark.timeout(600)
def test_the_example_is_killed_and_resumes(tmp_path: Path) -> None:
    whole = _run(tmp_path, "whole")
    assert whole.returncode == 0, whole.stderr
    assert (tmp_path / "trace.json").exists()
    killed = _run(tmp_path, "killed", "--die-at", DIE_AT)
    assert killed.returncode != 0
    assert f"exitcode  : -{int(signal.SIGKILL)}" in killed.stderr, killed.stderr
    assert (tmp_path / "killed" / "latest").read_text() == f"global_step{DIE_AT - EVERY}"
    resumed = _run(tmp_path, "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert f"starting at step {DIE_AT - EVERY}" in resumed.stdout
    assert len(_losses(whole)) == STEPS
    assert _losses(killed) == {step: loss for step, loss in _losses(whole).items() if step <= DIE_AT}
    assert _losses(resumed) == {step: loss for step, loss in _losses(whole).items() if step > DIE_AT - EVERY}


def _run(directory: Path, checkpoints: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    command += ["--checkpoints", checkpoints, "--steps", STEPS, "--save-every", EVERY, *options]
    return subprocess.run(
        list(map(str, command)),
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def _losses(done: subprocess.CompletedProcess[str]) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)}
