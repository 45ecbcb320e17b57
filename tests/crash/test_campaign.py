"""A few rounds of the campaign, and a few power cuts; ``make check-long`` runs many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import power_cuts
import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")
POWER_CUTS = Path(__file__).with_name("power_cuts.py")
ROUNDS, CUTS = 20, 3


@pytest.mark.by_hand
def test_rounds_of_random_states_faults_kills_and_changes(tmp_path: Path, run: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    ended = run(CAMPAIGN, tmp_path, "--rounds", ROUNDS, timeout=240)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    counted = dict(line.split()[::-1] for line in ended.stdout.splitlines() if not line.startswith("seeds"))
    assert int(counted["rounds"]) == ROUNDS
    assert {"closed", "killed", "committed", "restored", "StorageError"} <= set(counted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ext4", "xfs", pytest.param("btrfs", marks=pytest.mark.by_hand)])
def test_power_cuts_lose_nothing_that_was_committed(kind: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run(POWER_CUTS, tmp_path, kind, "--cuts", CUTS, timeout=240)
    if ended.returncode == power_cuts.CANNOT:
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert list(tmp_path.iterdir()) == []
