"""A few rounds of the campaign with tiers; by hand, and in ``make check-long``, it runs thousands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = Path(__file__).with_name("tier_campaign.py")
SHORT, LONG = 5, 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("far", "rounds"),
    [("disk", SHORT), *(pytest.param(far, LONG, marks=pytest.mark.by_hand) for far in ("disk", "moto", "localbucket"))],
)
@pytest.mark.timeout(400)
def test_rounds_of_runs_with_a_far_place_commands_and_kills(
    far: str, rounds: int, tmp_path: Path, run: Callable[..., Any]
) -> None:
    if far != "disk":
        pytest.importorskip("obstore")
        pytest.importorskip(far)
    ended = run(CAMPAIGN, tmp_path, "--far", far, "--rounds", rounds, "--seed", 1, timeout=380)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    counted = {name: int(count) for count, name in (line.split(None, 1) for line in ended.stdout.splitlines()[:-1])}
    assert counted["rounds"] == rounds
    assert {"committed", "placed", "restored", "emptied", "ended", "run ended by SIGKILL"} <= set(counted)
    assert rounds == SHORT or {"drain ended by SIGKILL", "fetched", "dead"} <= set(counted)
    assert list(tmp_path.iterdir()) == []
