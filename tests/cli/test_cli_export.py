"""The exit status of ``datastates export``, and what its errors name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import run

import datastates as ds
from datastates.providers import from_state_dict


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ds.Checkpointer(tmp_path / "runs") as checkpointer:
        for step in (1, 20):
            checkpointer.snapshot([from_state_dict("s", {"w": np.arange(40_000.0)})], step=step).wait_committed()
    return tmp_path / "runs"


@pytest.mark.parametrize("target", ["out", "out.pt", "out.safetensors"])
def test_the_status_is_1_if_the_checkpoint_is_damaged(
    root: Path, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = root / "step-00000020" / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[data.index(np.arange(8.0, 16.0).tobytes())] ^= 1
    file.write_bytes(data)
    assert run(capsys, "export", root / "step-00000020", tmp_path / target)[0] == 1
    assert not (tmp_path / target).exists()


def test_a_target_that_cannot_be_made_is_no_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ds.DatastatesError, match="/proc/such") as caught:
        ds.export(root, "/proc/such")
    assert "looks whole" not in str(caught.value)
    assert run(capsys, "export", root, "/proc/such")[0] == 1
