"""The random states of devices that the restoring machine lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import datastates as ds
from datastates.providers import RngProvider
from datastates.state import devices


def test_states_of_devices_that_are_not_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = torch.cuda.get_rng_state_all()
    saved = [*here, torch.get_rng_state()]
    monkeypatch.setattr(devices, "rng_states", lambda: {"cuda": saved})
    ds.snapshot([RngProvider()], tmp_path / "c").wait_committed()
    ds.restore([RngProvider()], tmp_path / "c")
    assert f"random states of {len(saved)} GPUs were saved, {len(here)} are here" in caplog.messages
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), here))
