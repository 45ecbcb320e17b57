"""An import of the source folder, which has no compiled module, says what is wrong, and the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("how", [["-c", "import datastates"], ["-m", "datastates", "ls"], ["-m", "datastates.demo"]])
def test_the_remedy_is_told(how: list[str]) -> None:
    done = subprocess.run([sys.executable, "-B", *how], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "circular" not in said
    assert f"{ROOT / 'datastates'} has the sources of datastates without its compiled module." in said
    assert "run it from another folder" in said
    assert said.endswith(f"pip install {ROOT}")
