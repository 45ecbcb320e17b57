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


def test_what_was_cast_is_not_called_as_saved(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"w": np.ones(3), "half": np.ones(2, np.float16), "n": np.arange(3)}
    ds.snapshot([from_state_dict("s", state)], tmp_path / "mixed").wait_committed()
    last = [
        run(capsys, "export", tmp_path / source, tmp_path / f"{i}.pt", *options)[1]
        .splitlines()[-1]
        .rpartition("), ")[2]
        for i, (source, options) in enumerate(
            {"mixed": ["--dtype", "fp16"], "runs": ["--dtype", "fp32"], "mixed/rank-00000.pt": []}.items()
        )
    ]
    assert last == ["1 cast to fp16, the others as saved", "1 cast to fp32", "as saved"]
    assert ds.export(tmp_path / "mixed", tmp_path / "3.pt", dtype="fp32").cast == ("s/w", "s/half")
