"""Checkpoints with kept containers in further tiers: there all is written, and the nearest whole file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from far_store import FarStore
from whole_saves import a_state, assert_equal, copy_of, save

import datastates as ds
from datastates.cli import commands
from datastates.commit.tiers import tier_of
from datastates.formats import own
from datastates.providers import from_state_dict
from datastates.storage import Location

FAR = "far://bucket/run"
pytestmark = pytest.mark.usefixtures("linking")


def saved(first: Path, further: list[Any]) -> dict[int, dict[str, Any]]:
    state, expected = a_state(), {}
    with ds.Checkpointer(first, tiers=further, incremental=True) as checkpointer:
        for step in range(3):
            state["large.1"] += 1
            save(checkpointer, state, step)
            expected[step] = copy_of(state)
        checkpointer.wait_drained()
    return expected


def test_each_tier_has_the_whole_state(first: Path, tmp_path: Path, store: FarStore) -> None:
    shared = tmp_path / "shared"
    expected = saved(first, [shared, FAR])
    kept = [path.stat() for path in sorted(shared.glob("step-*/rank-00000.kept.pt"))]
    assert [one.st_nlink for one in kept] == [1, 1]
    for place in (shared, FAR):
        for one in tier_of(Location.of(place)).checkpoints():
            assert_equal(ds.load(one.path.face)["state"], expected[one.step])
            assert list(own.open(one.path).verify(lambda nbytes: None)) == []
    live = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in expected[2].items()}
    with ds.Checkpointer(FAR) as checkpointer:
        assert checkpointer.restore([from_state_dict("state", live)]) is not None
    assert_equal(live, expected[2])


def test_a_damaged_one_is_read_from_the_next_place(first: Path, store: FarStore) -> None:
    expected = saved(first, [FAR])
    kept = first / "step-00000002" / "rank-00000.kept.pt"
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    live = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for k, v in expected[2].items()}
    with ds.Checkpointer(first, tiers=FAR) as checkpointer:
        restored = checkpointer.restore([from_state_dict("state", live)])
    assert restored is not None
    assert restored.step == 2
    assert_equal(live, expected[2])


def test_it_is_fetched(first: Path, tmp_path: Path, store: FarStore) -> None:
    expected = saved(first, [FAR])
    assert commands.main(["fetch", FAR, str(tmp_path / "back")]) == 0
    (found,) = (tmp_path / "back").glob("step-*")
    assert_equal(ds.load(found)["state"], expected[2])
    assert {file.name for file in found.glob("rank-*")} == {"rank-00000.pt", "rank-00000.kept.pt"}


def test_a_bucket_shares_nothing_and_says_so(store: FarStore, caplog: pytest.LogCaptureFixture) -> None:
    state = a_state()
    with ds.Checkpointer(FAR, incremental=True) as checkpointer:
        for step in range(3):
            save(checkpointer, state, step)
    assert [r.getMessage() for r in caplog.records if "incremental" in r.getMessage()] == [
        f"incremental: each checkpoint is written in full, as files do not share bytes in {FAR}"
    ]
    assert_equal(ds.load(FAR)["state"], state)
